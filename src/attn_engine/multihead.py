"""`MultiheadAttention`: the layer of the transformer, with torch's parameters and no torch."""

from collections.abc import Mapping
from operator import attrgetter
from os import PathLike
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import config
from .arrays import as_dtype, as_floats, compute_type
from .dot_product import scaled_dot_product_attention
from .options import check_count, check_flag, check_share
from .outputs import weights_html
from .parameters import (
    check_parameters,
    initial_parameters,
    parameter_shapes,
    read_arguments,
    read_safetensors,
)
from .problem_multihead import Inputs, check_inputs, engine_masks
from .projection import heads_first, project, project_inputs, with_rows
from .shapes import Shape


class MultiheadResult(NamedTuple):
    """What a call of `MultiheadAttention` returns; weights are None where not asked for."""

    output: np.ndarray
    weights: np.ndarray | None
    _repr_html_ = weights_html


class MultiheadAttention:
    r"""``torch.nn.MultiheadAttention`` for NumPy: in its masks **True = ignore**, as in torch.

    .. math:: \mathrm{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_h) W^O, \quad
              \mathrm{head}_i = \mathrm{attention}(Q W_i^Q, K W_i^K, V W_i^V)

    Arguments, names of parameters, layouts and numbers are torch's, so that weights trained there
    run here. A new layer is in evaluation mode. Parameters are arrays under torch's names
    (``layer.in_proj_weight``, ``layer.out_proj.bias``), None where the layer has none; change them
    with `load_state_dict`.

    Parameters
    ----------
    embed_dim : int
        Size of queries and of the output, a multiple of `num_heads`: every head has
        ``embed_dim // num_heads``.
    num_heads : int
        Heads of the query.
    dropout : float
        Share of the weights dropped in training mode (see `train`), at least 0 and less than 1.
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
        num_kv_heads * head size, ``in_proj_weight`` has embed_dim + 2 * kv_dim rows, those of query,
        key and value in this order, and so has ``in_proj_bias``; ``k_proj_weight`` and
        ``v_proj_weight`` have kv_dim rows, ``bias_k`` and ``bias_v`` kv_dim columns.
    rng : numpy.random.Generator or seed, optional
        Source of the initial parameters, which are drawn as torch does (uniform after Glorot, biases
        0), and of what dropout drops.

    Raises
    ------
    ValueError
        Sizes that are not positive or do not divide.
    TypeError
        An argument is of a wrong kind.

    Notes
    -----
    A row that sees no key has weights 0 and attends to 0, so that its output is ``out_proj.bias``,
    whether weights are asked for or not; torch gives NaN if they are.

    Projections are products of NumPy, whose BLAS has threads of its own (set them with
    OPENBLAS_NUM_THREADS or threadpoolctl); ``num_threads`` acts on attention.

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

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        dtype: DTypeLike = np.float32,
        num_kv_heads: int | None = None,
        rng: np.random.Generator | int | None = None,
    ):
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.num_heads = check_count("num_heads", num_heads)
        self.num_kv_heads = (
            self.num_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
        )
        for name, size, divisor, of in (
            ("embed_dim", self.embed_dim, self.num_heads, "num_heads"),
            ("num_heads", self.num_heads, self.num_kv_heads, "num_kv_heads"),
        ):
            if size % divisor:
                raise ValueError(f"{name}: {size} is not a multiple of {of}, which is {divisor}")
        self.kdim = self.embed_dim if kdim is None else check_count("kdim", kdim)
        self.vdim = self.embed_dim if vdim is None else check_count("vdim", vdim)
        self.head_dim = self.embed_dim // self.num_heads
        self._kv_dim = self.num_kv_heads * self.head_dim
        self.dropout = check_share("dropout", dropout)
        self.bias = check_flag("bias", bias)
        self.add_bias_kv = check_flag("add_bias_kv", add_bias_kv)
        self.add_zero_attn = check_flag("add_zero_attn", add_zero_attn)
        self.batch_first = check_flag("batch_first", batch_first)
        self.dtype = as_dtype(dtype)
        self.training = False
        self._rng = np.random.default_rng(rng)
        self._set(initial_parameters(self._shapes(), self._rng))

    def _shapes(self) -> dict[str, Shape]:
        """The shape of every parameter."""
        return parameter_shapes(
            self.embed_dim, self._kv_dim, self.kdim, self.vdim, self.bias, self.add_bias_kv
        )

    def _set(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Hold copies, rounded to the layer's dtype, in the type they are computed in."""
        compute = compute_type(self.dtype)
        with np.errstate(over="ignore"):  # what float16 cannot hold is infinite there
            held = {
                name: np.array(array.astype(self.dtype), compute, order="C")
                for name, array in parameters.items()
            }
        self.in_proj_weight = held.get("in_proj_weight")
        self.q_proj_weight = held.get("q_proj_weight")
        self.k_proj_weight = held.get("k_proj_weight")
        self.v_proj_weight = held.get("v_proj_weight")
        self.in_proj_bias = held.get("in_proj_bias")
        self.bias_k = held.get("bias_k")
        self.bias_v = held.get("bias_v")
        self.out_proj = SimpleNamespace(
            weight=held["out_proj.weight"], bias=held.get("out_proj.bias")
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the parameters under torch's names, in torch's order and the layer's dtype."""
        return {name: attrgetter(name)(self).astype(self.dtype) for name in self._shapes()}

    def load_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> None:
        """Copy parameters from arrays or tensors under torch's names.

        Parameters
        ----------
        state_dict : mapping of str to array_like
            All parameters of the layer and no others, of any floating dtype; they are rounded to
            the layer's.

        Raises
        ------
        ValueError
            Names are missing or unexpected, or a shape is wrong. The layer is unchanged then.
        TypeError
            Not a mapping, a parameter is not floating, a tensor requires grad or lives elsewhere.
        """
        self._set(check_parameters(state_dict, self._shapes()))

    @classmethod
    def from_torch(cls, module: Any) -> "MultiheadAttention":
        """A layer with the arguments and copies of the parameters of a torch.nn.MultiheadAttention.

        It is in evaluation mode, whatever the module is in. TypeError if the module is another.
        """
        try:
            num_heads = module.num_heads
            options = {n: getattr(module, n) for n in ("dropout", "add_zero_attn", "batch_first")}
        except AttributeError as error:
            raise TypeError(
                f"module: got {type(module).__name__}, expected torch.nn.MultiheadAttention; {error}"
            ) from None
        return cls._from_parameters(module.state_dict(), num_heads, "module", options)

    @classmethod
    def from_safetensors(
        cls,
        path: str | PathLike,
        prefix: str = "",
        *,
        num_heads: int,
        dropout: float = 0.0,
        add_zero_attn: bool = False,
        batch_first: bool = False,
    ) -> "MultiheadAttention":
        """A layer with the parameters that a safetensors file has under torch's names.

        Parameters
        ----------
        path : str or path
        prefix : str
            What stands before the names, e.g. ``"encoder.layers.0.self_attn"``.
        num_heads, dropout, add_zero_attn, batch_first
            As of the constructor; no file says them. The other arguments are read off the shapes.

        Raises
        ------
        ImportError
            The package safetensors is missing; the extra of that name brings it.
        ValueError
            Parameters are missing or unexpected, or their shapes do not fit together.
        TypeError
            The parameters are bfloat16, and the package ml_dtypes is missing.
        """
        options = {"dropout": dropout, "add_zero_attn": add_zero_attn, "batch_first": batch_first}
        parameters = read_safetensors(path, prefix)
        return cls._from_parameters(parameters, num_heads, str(path), options)

    @classmethod
    def _from_parameters(
        cls, parameters: Mapping[str, Any], num_heads: int, source: str, options: dict[str, Any]
    ) -> "MultiheadAttention":
        """A layer made to fit its parameters."""
        arguments = read_arguments(parameters, num_heads, source)
        dtype = as_floats("out_proj.weight", parameters["out_proj.weight"]).dtype
        layer = cls(**arguments, **options, dtype=dtype)
        layer.load_state_dict(parameters)
        return layer

    def train(self, mode: bool = True) -> "MultiheadAttention":
        """Switch dropout on, or off with False; returns the layer."""
        self.training = check_flag("mode", mode)
        return self

    def eval(self) -> "MultiheadAttention":
        """Switch dropout off; returns the layer."""
        return self.train(False)

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
    ) -> MultiheadResult:
        """Project, attend head by head, join and project; in bool masks True = ignore.

        Parameters
        ----------
        query : array_like, shape (n_q, batch, embed_dim)
            (batch, n_q, embed_dim) with `batch_first`, (n_q, embed_dim) without a batch. In the
            dtype of the layer. Passing one object as query, key and value saves products.
        key : array_like, shape (n_kv, batch, kdim)
            Axes as of `query`.
        value : array_like, shape (n_kv, batch, vdim)
            Axes as of `query`.
        key_padding_mask : array_like, shape (batch, n_kv), optional
            (n_kv,) without a batch. Boolean: True = ignore this key. Floating: added to the scores;
            only -inf hides.
        need_weights : bool
            Also return the weights. The output has the same bits without them.
        attn_mask : array_like, shape (n_q, n_kv) or (batch * num_heads, n_q, n_kv), optional
            Boolean: True = ignore. Floating: added to the scores; only -inf hides. The masks may be
            of different kinds: a key is seen if both allow it.
        average_attn_weights : bool
            Return the mean of the weights over heads.
        is_causal : bool
            Query i sees key j only if ``j <= i``, on top of the masks. (In torch it is a hint that
            `attn_mask` says the same; that call gives the same here, and the mask may be left out.)
        num_threads : int, optional
            Upper bound for attention; see `set_num_threads` for the default.

        Returns
        -------
        output : ndarray, shape and dtype of `query`
        weights : ndarray, shape (batch, n_q, n_kv) or None
            (batch, num_heads, n_q, n_kv) without `average_attn_weights`, no batch axis without a
            batch. Keys that the layer adds come last. Before dropout, in training mode too.

        Raises
        ------
        ValueError
            A shape or a value is wrong.
        TypeError
            An argument is of a wrong kind: another dtype than the layer's, an integer mask.
        """
        need_weights = check_flag("need_weights", need_weights)
        average = check_flag("average_attn_weights", average_attn_weights)
        is_causal = check_flag("is_causal", is_causal)
        threads = config.resolve_threads(num_threads)
        features = (self.embed_dim, self.kdim, self.vdim)
        inputs = check_inputs(query, key, value, self.dtype, features, self.batch_first)
        added = self.add_bias_kv + self.add_zero_attn
        masks = (key_padding_mask, attn_mask, is_causal)
        options = engine_masks(*masks, inputs, self.num_heads, added, compute_type(self.dtype))
        if self.training and self.dropout:
            seed = int(self._rng.integers(2**64, dtype=np.uint64))
            options |= {"dropout_p": self.dropout, "dropout_seed": seed}

        q, k, v = self._projected(inputs, threads)
        context = np.empty(inputs.query.shape, q.dtype)
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            enable_gqa=True,
            return_weights=need_weights,
            out=heads_first(context, self.head_dim, inputs.batch_axis),
            num_threads=num_threads,
            **options,
        )
        output = project(context, self.out_proj.weight, self.out_proj.bias, threads)
        weights = None
        if need_weights:
            weights = np.roll(attended.weights, -added, -1) if added else attended.weights
            weights = weights.mean(1) if average else weights
            weights = weights.astype(self.dtype, copy=False)
        if not inputs.batched:
            output, weights = output[0], weights[0] if need_weights else None
        return MultiheadResult(output.astype(self.dtype, copy=False), weights)

    __call__ = forward

    def _projected(self, inputs: Inputs, threads: int) -> list[np.ndarray]:
        """Queries, keys and values (batch, heads, n, head_dim), those that the layer adds first."""
        weights = self.in_proj_weight
        if weights is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        sizes = (self.embed_dim, self._kv_dim)
        parts = project_inputs(inputs[:3], weights, self.in_proj_bias, sizes, threads)
        for i, row in ((1, self.bias_k), (2, self.bias_v)):
            rows = [row] * self.add_bias_kv + [np.zeros(1, parts[i].dtype)] * self.add_zero_attn
            parts[i] = with_rows(rows, parts[i], 1 - inputs.batch_axis)
        return [heads_first(part, self.head_dim, inputs.batch_axis) for part in parts]
