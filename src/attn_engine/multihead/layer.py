"""`MultiheadAttention`: the layer of the transformer, with torch's parameters but without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike

from .. import config
from ..inputs.arrays import as_array
from ..inputs.options import check_flag
from ..linear import heads_first, project, project_inputs, with_rows
from ..results import MultiheadGradients, MultiheadResult, SavedMultiheadResult
from .attend import attend
from .backward import NAMES, Saved, multihead_backward
from .checks import Inputs, check_inputs, check_masks
from .parameters import MultiheadParameters
from .prepare import engine_masks


class MultiheadAttention(MultiheadParameters):
    r"""Compute multi-head attention like torch's layer; in bool masks **True = ignore**.

    .. math:: \mathrm{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_h) W^O, \quad
              \mathrm{head}_i = \mathrm{attention}(Q W_i^Q, K W_i^K, V W_i^V)

    Arguments, names of parameters, layouts and numbers are torch's, so that weights trained there
    run here. A new layer is in evaluation mode. Parameters are arrays under torch's names
    (``layer.in_proj_weight``, ``layer.out_proj.bias``), None where the layer has none; change them
    with `load_state_dict`, or those of `named_parameters` in place. To train the layer call
    `forward_and_save` and `backward`.

    Parameters
    ----------
    embed_dim : int
        Size of queries and of the output, a multiple of `num_heads`: every head has
        ``embed_dim // num_heads``.
    num_heads : int
        Heads of the query.
    dropout : float
        Fraction of the weights that is dropped in training mode (see `train`), in [0, 1).
    bias : bool
        Whether projections add ``in_proj_bias`` and ``out_proj.bias``.
    add_bias_kv : bool
        Add a learned key and value, ``bias_k`` and ``bias_v``, that every query sees.
    add_zero_attn : bool
        Add a key and a value of zeros that every query sees.
    kdim, vdim : int, optional
        Sizes of keys and values before projection, `embed_dim` by default.
    batch_first : bool
        Tensors are (batch, n, features) instead of (n, batch, features).
    dtype : dtype
        float16, bfloat16 (of ml_dtypes), float32 or float64: of parameters, tensors and results.
        16-bit parameters are held widened to float32, in which everything is computed.
    num_kv_heads : int, optional
        Heads of key and value, a divisor of `num_heads` and equal to it by default. With kv_dim =
        num_kv_heads * head size, ``in_proj_weight`` has embed_dim + 2 * kv_dim rows, those of
        query, key and value in this order, and so has ``in_proj_bias``; ``k_proj_weight`` and
        ``v_proj_weight`` have kv_dim rows, ``bias_k`` and ``bias_v`` kv_dim columns.
    rng : numpy.random.Generator or seed, optional
        Source of the initial parameters, which are drawn as torch does (uniform after Glorot,
        biases 0), and of the dropout masks.

    Raises
    ------
    ValueError
        Sizes are not positive, or one does not divide another.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    A row that sees no key has weights 0, and its output is ``out_proj.bias``, whether weights are
    requested or not; torch gives NaN if they are.

    Projections are NumPy products. NumPy's BLAS has threads of its own (set them with
    OPENBLAS_NUM_THREADS or threadpoolctl); ``num_threads`` limits attention only.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2. Shared heads: Ainslie et al.,
    "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from attn_engine import MultiheadAttention
    >>> layer = MultiheadAttention(embed_dim=128, num_heads=8, batch_first=True, rng=0)
    >>> decoder, encoder = np.ones((2, 5, 128), np.float32), np.ones((2, 10, 128), np.float32)
    >>> output, weights = layer(decoder, encoder, encoder)
    >>> output.shape, weights.shape
    ((2, 5, 128), (2, 5, 10))
    """

    @overload
    def forward(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: Literal[True] = True,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> MultiheadResult[np.ndarray]: ...  # fmt: skip
    @overload
    def forward(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: Literal[False] = ...,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> MultiheadResult[None]: ...  # fmt: skip
    @overload
    def forward(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: bool = ...,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> MultiheadResult[np.ndarray | None]: ...  # fmt: skip
    def forward(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        key_padding_mask: ArrayLike | None = None,
        need_weights: bool = True,
        attn_mask: ArrayLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        num_threads: int | None = None,
    ) -> MultiheadResult[Any]:
        """Project, attend with each head, concatenate and project; in bool masks True = ignore.

        Parameters
        ----------
        query : array_like, shape (n_q, batch, embed_dim)
            (batch, n_q, embed_dim) with `batch_first`, (n_q, embed_dim) without a batch. In the
            dtype of the layer. Passing the same object several times saves projections.
        key : array_like, shape (n_kv, batch, kdim)
            Axes like those of `query`.
        value : array_like, shape (n_kv, batch, vdim)
            Axes like those of `query`.
        key_padding_mask : array_like, shape (batch, n_kv), optional
            (n_kv,) without a batch. Boolean: True = ignore this key. Floating: added to the scores;
            only -inf hides.
        need_weights : bool
            Also return the weights. The output has the same bits without them.
        attn_mask : array_like, shape (n_q, n_kv) or (batch * num_heads, n_q, n_kv), optional
            Boolean: True = ignore. Floating: added to the scores; only -inf hides. One mask may be
            boolean and the other floating: a key is seen if both allow it.
        average_attn_weights : bool
            Return the mean of the weights over heads.
        is_causal : bool
            Query i sees key j only if ``j <= i``, in addition to the masks. (In torch it states
            that `attn_mask` is causal. Such a call gives the same here and needs no mask.)
        num_threads : int, optional
            Upper bound for attention; `set_num_threads` describes the default.

        Returns
        -------
        output : ndarray, shape and dtype of `query`
        weights : ndarray, shape (batch, n_q, n_kv) or None
            (batch, num_heads, n_q, n_kv) without `average_attn_weights`, no batch axis without a
            batch. Keys that the layer adds come last. Weights are those before dropout.

        Raises
        ------
        ValueError
            A shape or a value is wrong.
        TypeError
            An argument has a wrong type, for instance another dtype than the layer's.
        """
        tensors, masks = (query, key, value), (key_padding_mask, attn_mask, is_causal)
        result = self._run(tensors, masks, need_weights, average_attn_weights, num_threads, False)
        return MultiheadResult(result.output, result.weights)

    if TYPE_CHECKING:
        __call__ = forward
    else:

        def __call__(self, *arguments: Any, **options: Any) -> MultiheadResult:
            """Call `forward`, or a subclass's own."""
            return self.forward(*arguments, **options)

    @overload
    def forward_and_save(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: Literal[True] = True,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> SavedMultiheadResult[np.ndarray]: ...  # fmt: skip
    @overload
    def forward_and_save(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: Literal[False] = ...,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> SavedMultiheadResult[None]: ...  # fmt: skip
    @overload
    def forward_and_save(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike,
        key_padding_mask: ArrayLike | None = None, need_weights: bool = ...,
        attn_mask: ArrayLike | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, num_threads: int | None = None,
    ) -> SavedMultiheadResult[np.ndarray | None]: ...  # fmt: skip
    def forward_and_save(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        key_padding_mask: ArrayLike | None = None,
        need_weights: bool = True,
        attn_mask: ArrayLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        num_threads: int | None = None,
    ) -> SavedMultiheadResult[Any]:
        """Run `forward` and also return what `backward` needs.

        Parameters
        ----------
        query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights
            As in `forward`.
        is_causal, num_threads
            As in `forward`.

        Returns
        -------
        output, weights
            As `forward`, in the same bits.
        saved : Saved
            For `backward`. It refers to the inputs and parameters, which must not be changed in
            place before then, and holds the projected tensors, the heads' results and their lse.

        Raises
        ------
        ValueError, TypeError
            As in `forward`.
        """
        tensors, masks = (query, key, value), (key_padding_mask, attn_mask, is_causal)
        return self._run(tensors, masks, need_weights, average_attn_weights, num_threads, True)

    def backward(
        self,
        grad_output: ArrayLike,
        saved: Saved,
        *,
        grad_weights: ArrayLike | None = None,
        needs: Iterable[str] = NAMES,
        num_threads: int | None = None,
    ) -> MultiheadGradients:
        r"""Compute gradients of a call by its inputs and the layer's parameters.

        Parameters
        ----------
        grad_output : array_like, shape and dtype of the output
            Gradient by the output, with any strides.
        saved : Saved
            What `forward_and_save` of this layer returned.
        grad_weights : array_like, shape and dtype of the weights, optional
            Gradient by the weights that were returned, averaged or not, for losses on the
            alignment.
        needs : iterable of str
            Which gradients to compute, by the names of the result or of single parameters. The
            others are None, and so are those of absent arguments and boolean masks.
        num_threads : int, optional
            Upper bound for attention; `set_num_threads` describes the default.

        Returns
        -------
        query, key, value : ndarray
            In the shape and dtype of the argument. If one array was passed as several of them, add
            their gradients.
        key_padding_mask, attn_mask : ndarray
            Of a floating mask, in the mask's shape and dtype.
        parameters : dict of str to ndarray
            Under the names of `state_dict`, in the layer's dtype.

        Raises
        ------
        ValueError
            A shape or a value is wrong, or `saved` comes from another layer. Nothing is returned.
        TypeError
            An argument has a wrong type.
        MemoryError
            There is not enough memory for the gradients or for scratch space.

        Notes
        -----
        The products are NumPy's. As in `scaled_dot_product_attention_backward`, a hidden key gets a
        gradient of exactly 0 and adds nothing to others, and 16-bit types are rounded once. A row
        that sees no key adds only to ``out_proj.bias``, which is its output.

        Examples
        --------
        One step down the gradient of the sum of all outputs:

        >>> import numpy as np
        >>> from attn_engine import MultiheadAttention
        >>> layer = MultiheadAttention(embed_dim=4, num_heads=2, batch_first=True, rng=0)
        >>> x = np.eye(3, 4, dtype=np.float32)
        >>> output, weights, saved = layer.forward_and_save(x, x, x)
        >>> gradients = layer.backward(np.ones_like(output), saved)
        >>> for name, parameter in layer.named_parameters():
        ...     parameter -= 0.1 * gradients.parameters[name]
        >>> bool(layer(x, x, x).output.sum() < output.sum())
        True
        """
        if not isinstance(saved, Saved):
            raise TypeError(
                f"saved: got {type(saved).__name__}, expected what forward_and_save returned last"
            )
        if saved.layer is not self:
            raise ValueError(
                "saved: comes from a different layer; pass what this layer's forward_and_save "
                "returned"
            )
        threads = config.resolve_threads(num_threads)
        return multihead_backward(saved, grad_output, grad_weights, needs, threads)

    def _run(
        self,
        tensors: tuple[Any, Any, Any],
        masks: tuple[Any, Any, Any],
        need_weights: Any,
        average: Any,
        num_threads: Any,
        save: bool,
    ) -> SavedMultiheadResult[Any]:
        """Run `forward`; the third result, `saved`, is None unless requested."""
        need_weights = check_flag("need_weights", need_weights)
        average = check_flag("average_attn_weights", average)
        threads = config.resolve_threads(num_threads)
        inputs, options = self._checked(tensors, masks, save)
        if self.training and self.dropout:
            seed = int(self._rng.integers(2**64, dtype=np.uint64))
            options |= {"dropout_p": self.dropout, "dropout_seed": seed}

        settings = self._settings
        with np.errstate(all="ignore"):  # padding may hold anything, infinities included
            heads = self._projected(inputs)
            context = np.empty(inputs.query.shape, heads[0].dtype)
            out = heads_first(context, settings.head_dim, inputs.batch_axis)
            weights, lse = attend(heads, out, options, need_weights, save, threads)
            output = project(context, self.out_proj.weight, self.out_proj.bias)
            if need_weights:
                weights = np.roll(weights, -settings.added, -1) if settings.added else weights
                if average:
                    weights = np.add.reduce(weights, 1) / settings.num_heads
                weights = weights.astype(settings.dtype, copy=False)
            output = output.astype(settings.dtype, copy=False)
        saved = None
        if save:
            given = {"key_padding_mask": masks[0], "attn_mask": masks[1]}
            given = {name: None if x is None else as_array(name, x) for name, x in given.items()}
            parameters, returned = dict(self.named_parameters()), average if need_weights else None
            saved = Saved(self, parameters, inputs, heads, context, lse, options, given, returned)
        if not inputs.batched:
            output, weights = output[0], weights[0] if need_weights else None
        return SavedMultiheadResult(output, weights, saved)

    def _checked(
        self, tensors: tuple[Any, Any, Any], masks: tuple[Any, Any, Any], keep_bias: bool = False
    ) -> tuple[Inputs, dict[str, Any]]:
        """Check the inputs; return them with the options of attention."""
        padding, mask, is_causal = masks
        is_causal, settings = check_flag("is_causal", is_causal), self._settings
        self.check_parameters()
        features = settings.embed_dim, settings.kdim, settings.vdim
        hints = {"key_padding_mask": padding, "attn_mask": mask}
        inputs = check_inputs(*tensors, settings.dtype, features, settings.batch_first, **hints)
        if padding is mask is None:
            options = {"is_causal": True, "causal_offset": settings.added} if is_causal else {}
        else:
            padding, mask = check_masks(padding, mask, inputs, settings.num_heads)
            options = engine_masks(
                padding, mask, is_causal, inputs, settings.added, settings.compute, keep_bias
            )
        return inputs, options

    def _projected(self, inputs: Inputs) -> tuple[np.ndarray, ...]:
        """Return queries, keys and values (batch, heads, n, head_dim), with added keys first."""
        settings, weights = self._settings, self.in_proj_weight
        if weights is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        sizes = (settings.embed_dim, settings.kv_dim)
        parts = project_inputs(inputs[:3], weights, self.in_proj_bias, sizes)
        if settings.added:
            for i, row in ((1, self.bias_k), (2, self.bias_v)):
                zero = np.zeros(1, parts[i].dtype)
                rows = [row] * settings.add_bias_kv + [zero] * settings.add_zero_attn
                parts[i] = with_rows(rows, parts[i], 1 - inputs.batch_axis)
        return tuple(heads_first(part, settings.head_dim, inputs.batch_axis) for part in parts)
