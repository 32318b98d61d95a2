"""Keys of additive attention projected once and stored read-only."""

import numpy as np

from .. import _core
from ..config import resolve_threads
from ..inputs.arrays import CODES, as_floats, compute_type, native
from ..shapes.words import ShapeError


class ProjectedKeys:
    """Encoder states projected once for all decoder steps; `project_keys` makes it.

    To select or reorder entries, make a new one from `keys` and `projected`:
    ``ProjectedKeys(p.keys[order], p.projected[order])``.
    """

    __slots__ = ("_exponentials", "_isa", "_keys", "_projected")

    def __init__(self, keys: np.ndarray, projected: np.ndarray, threads: int | None = None):
        keys, projected = as_floats("keys", keys), as_floats("projected", projected)
        if keys.ndim not in (2, 3) or keys.shape[:-1] != projected.shape[:-1]:
            raise ShapeError(
                f"projected: shape {projected.shape}, expected (..., T_enc, d_attn) with the batch "
                f"and T_enc of keys {keys.shape}",
                "give every key one row",
                "projected", projected.shape, (*keys.shape[:-1], *projected.shape[-1:]),
                "(..., T_enc, d_attn)",
            )  # fmt: skip
        if native(projected.dtype) != compute_type(keys.dtype):
            raise TypeError(
                f"projected: dtype {projected.dtype}, expected {compute_type(keys.dtype)}, which "
                f"keys of {keys.dtype} are computed in"
            )
        self._keys = keys
        # A private read-only copy, because the exponentials below must stay consistent with it.
        self._projected = np.array(projected, native(projected.dtype), order="C")
        self._projected.setflags(write=False)
        self._prepare(resolve_threads(None) if threads is None else threads)

    def _prepare(self, threads: int) -> None:
        """Compute the exponentials, in the layout and range of the tier that is selected now."""
        self._isa = _core.get_isa()
        *batch, n_kv, d_attn = self._projected.shape
        shape = (*batch, -(-n_kv // _core.GROUP), d_attn + 1, _core.GROUP)
        self._exponentials = np.empty(shape, self._projected.dtype)
        code = CODES[self._projected.dtype]
        _core.additive_keys(self._projected, self._exponentials, code, threads)

    @property
    def keys(self) -> np.ndarray:
        """The states that were passed; they are the values unless others are given."""
        return self._keys

    @property
    def projected(self) -> np.ndarray:
        """The projected keys (..., T_enc, d_attn) in the compute type, read-only."""
        return self._projected

    @property
    def exponentials(self) -> np.ndarray:
        """The exponentials of `projected`, recomputed after a change of tier."""
        if self._isa != _core.get_isa():
            self._prepare(resolve_threads(None))
        return self._exponentials

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Raise TypeError, so that functions that take any array reject this object."""
        raise TypeError("ProjectedKeys are for additive_attention; pass the states, its .keys")

    def __reduce__(self) -> tuple:
        """Pickle the arrays alone, because the exponentials depend on the tier of the CPU."""
        return ProjectedKeys, (self._keys, self._projected)

    def __repr__(self) -> str:
        """Return the shapes and the dtype."""
        keys, d_attn = self.keys, self.projected.shape[-1]
        return f"ProjectedKeys(keys {keys.shape} {keys.dtype}, d_attn {d_attn})"
