"""Quantised weights: small-float data with power-of-two block scales, as checkpoints store them."""

from __future__ import annotations

import torch

from .formats import e2m1_values, e4m3_values, e8m0_values

TILE = 32  # quantization_config.weight_block_size is [32, 32], and FP4 has one scale per 32 columns


class Quantised:
    """A weight "... n k" held as data and scales.

    kind "fp8": data float8_e4m3fn (or its uint8 bytes) "... n k"; scale bytes either one per 32x32
        tile "... ceil(n/32) ceil(k/32)" (matrices) or one per row and 32 columns "... n k/32"
        (n-gram tables); told apart by the shape.
    kind "fp4": data uint8/int8 "... n k/2", two E2M1 values a byte, even column in the low nibble;
        scale bytes "... n k/32".

    A scale byte b is 2^(b-127) (E8M0); 255 is NaN and refused. Leading axes stack matrices, for
    example experts "e n k". Value = data * scale, exact in float32 (V4.1 checkpoint format).
    """

    __slots__ = ("data", "scale", "kind", "_per_row")

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, kind: str):
        if kind not in ("fp8", "fp4"):
            raise ValueError(f'kind={kind!r} of a quantised weight: use "fp8" or "fp4"')
        allowed = (torch.float8_e4m3fn, torch.uint8) if kind == "fp8" else (torch.uint8, torch.int8)
        if data.dtype not in allowed:
            raise TypeError(
                f"{kind} data has dtype {data.dtype}; expected "
                + " or ".join(str(d).removeprefix("torch.") for d in allowed)
            )
        if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise TypeError(f"scale has dtype {scale.dtype}; expected float8_e8m0fnu or its bytes")
        self.kind = kind
        # view, never copy_ or to: a cast from E8M0 to uint8 converts values (2^-7 becomes 0).
        self.data = data.view(torch.uint8)
        self.scale = scale.view(torch.uint8)
        self._per_row = self._check_scale()

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight it stands for, "... n k"."""
        *lead, k = self.data.shape
        return torch.Size((*lead, k * 2 if self.kind == "fp4" else k))

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str) -> Quantised:
        """The same weight on another device."""
        return Quantised(self.data.to(device), self.scale.to(device), self.kind)

    def __getitem__(self, index: int) -> Quantised:
        """One matrix of a stack."""
        if self.data.ndim < 3:
            raise TypeError(f"{self!r} is no stack of matrices; use .rows(ids, dtype) for rows")
        return self._like(self.data[index], self.scale[index])

    def select(self, ids: torch.Tensor) -> Quantised:
        """Matrices `ids "m"` of a stack, "m n k"."""
        if self.data.ndim < 3:
            raise TypeError(f"{self!r} is no stack of matrices; use .rows(ids, dtype) for rows")
        return self._like(self.data[ids], self.scale[ids])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight "... n k" in dtype."""
        return self._values(self.data, self.scale, dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids "..."` of a table "n k" -> "... k". Nothing else is dequantised."""
        if self.data.ndim != 2 or not self._per_row:
            raise TypeError(f"{self!r} has no scales per row, so single rows cannot be read")
        return self._values(self.data[ids], self.scale[ids], dtype)

    def __repr__(self) -> str:
        shape, scale = tuple(self.shape), tuple(self.scale.shape)
        return f"Quantised({self.kind}, shape={shape}, scale={scale}, {self.nbytes} bytes)"

    def _check_scale(self) -> bool:
        *lead, n, k = self.shape
        columns = -(-k // TILE)
        per_row = torch.Size((*lead, n, columns))
        per_tile = torch.Size((*lead, -(-n // TILE), columns))
        expected = [per_row] if self.kind == "fp4" else [per_tile, per_row]
        if self.scale.shape not in expected:
            raise ValueError(
                f"a {self.kind} weight of shape {(*lead, n, k)} has scales of shape "
                + " or ".join(str(tuple(e)) for e in expected)
                + f" (blocks of {TILE}), not {tuple(self.scale.shape)}"
            )
        if self.scale.numel() and bool((self.scale == 255).any()):
            raise ValueError(f"scales of a {self.kind} weight {(*lead, n, k)} hold byte 255 (NaN)")
        # A single row is both; per row is then the same thing.
        return self.scale.shape == per_row

    def _like(self, data: torch.Tensor, scale: torch.Tensor) -> Quantised:
        part = object.__new__(Quantised)
        part.data, part.scale, part.kind, part._per_row = data, scale, self.kind, self._per_row
        return part

    def _values(self, data, scale, dtype) -> torch.Tensor:
        values = e2m1_values(data) if self.kind == "fp4" else e4m3_values(data)
        factors = e8m0_values(scale)
        if not self._per_row:
            factors = factors.repeat_interleave(TILE, -2)[..., : values.shape[-2], :]
        factors = factors.repeat_interleave(TILE, -1)[..., : values.shape[-1]]
        return (values * factors).to(dtype)


def dense(weight: torch.Tensor | Quantised, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a float tensor of the given dtype, whatever it is stored as."""
    if isinstance(weight, Quantised):
        return weight.dequantise(dtype)
    return weight if weight.dtype == dtype else weight.to(dtype)
