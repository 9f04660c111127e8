"""A quantized tensor: codes, scales, and the cast that made them.

    x ~= decode(data) * (scale of its tile) * global_scale

A plain container, not a Tensor subclass: autograd and the compiler see ordinary tensors only.
Always two-dimensional, contracted axis last.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.formats import TableFormat
from narrowgauge.scaling import from_exponents, scale_shape, times_scale, unswizzled

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

_VALUES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class QTensor:
    """Codes and scales of one quantized matrix.

    data          codes of `cast.format`, in three possible layouts:
                  [outer, inner]                      its storage dtype, one code per element
                  [outer, ceil(inner / 2)] uint8      4-bit formats, two codes to a byte ("packed");
                                                      integer formats may also use one int8 per code
                  [outer, inner] float32, bfloat16    decoded values ("expanded"), for GEMMs on
                                                      hardware without low-precision units
    scale         float32 [ceil(outer / tile[0]), ceil(inner / tile[1])]
    cast          the Cast that made it
    inner         length of the contracted axis in elements
    global_scale  0-d float32 if the cast has one (two-level rules, headroom), else None
    checked       True skips validation, for parts of a QTensor that was already validated
    units         scales as tensor cores of 10.0 read them, a byte for each row and tile
                  (`scaling.swizzled`); None in all but a `SwizzledQTensor`
    """

    units: ClassVar[Tensor | None] = None

    data: Tensor
    scale: Tensor
    cast: Cast
    inner: int
    global_scale: Tensor | None = None
    checked: InitVar[bool] = False

    @classmethod
    def of_parts(
        cls, data: Tensor, scale: Tensor, cast: Cast, inner: int, global_scale: Tensor | None = None
    ) -> QTensor:
        """Construct as with checked=True, in half the time: each GEMM constructs two."""
        # Bypasses the frozen dataclass's __init__, which sets each field by object.__setattr__.
        self = object.__new__(cls)
        self.__dict__.update(
            data=data, scale=scale, cast=cast, inner=inner, global_scale=global_scale
        )
        return self

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            self._check()

    def _check(self) -> None:
        data, scale, cast, whole = self.data, self.scale, self.cast, self.global_scale
        columns = self.inner if not self.is_packed else -(-self.inner // cast.format.codes_per_byte)
        wrong, code = "", ""
        # Packed codes are uint8 like the storage of some formats, so `is_packed` decides by
        # codes_per_byte.
        if (
            data.dtype not in (cast.format.storage, *_VALUES) and not self.is_packed
        ) or scale.dtype != torch.float32:
            code = "qtensor.dtype"
            wrong = (
                f"data is {data.dtype} and scale {scale.dtype}; {cast.format} needs codes in {cast.format.storage}, packed ones in "
                "torch.uint8, or values in float32 or bfloat16, and a float32 scale"
            )
        elif data.ndim != 2 or scale.ndim != 2:
            code = "qtensor.axes"
            wrong = f"data {list(data.shape)} and scale {list(scale.shape)} must both be two-dimensional"
        elif (data.shape[1], *scale.shape) != (
            columns,
            *(sizes := scale_shape((data.shape[0], self.inner), cast.tile)),
        ):
            code = "qtensor.shape"
            wrong = (
                f"data {list(data.shape)} with scale {list(scale.shape)} does not fit {self.inner} {cast.format} elements per row "
                f"in tiles of {cast.tile}; expected {columns} columns and scale {list(sizes)}"
            )
        elif (whole is not None) != cast.has_global_scale:
            code = "qtensor.global-scale"
            wrong = f"cast {cast} {'needs' if cast.has_global_scale else 'takes no'} global_scale"
        elif whole is not None and (whole.ndim != 0 or whole.dtype != torch.float32):
            code = "qtensor.global-scale-shape"
            wrong = f"global_scale is {list(whole.shape)} {whole.dtype}; it must be a single float32 without axes"
        if wrong:
            raise ShapeError(
                f"QTensor: {wrong}. Build the tensor with quantize() from a two-dimensional one.",
                code=code,
            )

    @property
    def memory(self) -> Tensor:
        """The elements as they lie in memory: `data`, but for a `FoldedQTensor`."""
        return self.data

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.inner

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_expanded(self) -> bool:
        return self.data.dtype in _VALUES

    @property
    def is_packed(self) -> bool:
        # Integers of 4 bits may come one to a byte in int8: these are not packed.
        return self.data.dtype == torch.uint8 and self.cast.format.codes_per_byte > 1

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        extra = 0 if self.global_scale is None else self.global_scale.nbytes
        return self.memory.nbytes + self.scale.nbytes + extra

    def to(self, device: torch.device) -> QTensor:
        """Copy to `device`."""
        shared = None if self.global_scale is None else self.global_scale.to(device)
        return replace(
            self, data=self.data.to(device), scale=self.scale.to(device), global_scale=shared
        )

    def one_to_a_byte(self) -> Tensor:
        """Codes [outer, inner], unpacked if two share a byte."""
        return self.cast.format.unpack(self.data, self.inner) if self.is_packed else self.data

    def values(self) -> Tensor:
        """Decoded elements [outer, inner], not yet multiplied by their scales.

        float32, or the expanded dtype.
        """
        if self.data.dtype in _VALUES:
            return self.data
        if self.is_packed:
            return self.cast.format.decode_packed(self.data, self.inner)
        return self.cast.format.decode(self.data)

    def expanded(self, dtype: torch.dtype) -> QTensor:
        """The same tensor with decoded values in `dtype`, float32 or bfloat16.

        bfloat16 holds the values of all formats except tables. Raises ConfigError for these.
        """
        if dtype == torch.bfloat16 and isinstance(self.cast.format, TableFormat):
            raise ConfigError(
                f"expanded: levels of {self.cast.format} are not exact in {dtype}. Use torch.float32.",
                code="qtensor.expanded-dtype",
            )
        return replace(self, data=self.values().to(dtype), checked=True)

    def compact(self) -> QTensor:
        """The same tensor with codes: one byte per element, or half a byte."""
        if not self.is_expanded:
            return self
        format = self.cast.format
        # The values are representable, so torch's cast is exact and need not round.
        codes = (
            self.data.to(format.storage)
            if format.storage != torch.uint8
            else format.codes_of(self.data)
        )
        return replace(
            self, data=format.pack(codes) if format.codes_per_byte > 1 else codes, checked=True
        )

    def full_scale(self) -> Tensor:
        """Scales [outer tiles, inner tiles] float32, multiplied by the per-tensor scale."""
        return self.scale if self.global_scale is None else self.scale * self.global_scale

    def transposed(self) -> QTensor:
        """The transposed tensor as a view.

        Raises ShapeError unless the cast's tiles are symmetric.
        """
        # Packed codes share bytes along the contracted axis, so a transposed view would mix them
        # up.
        if self.cast.tile[0] != self.cast.tile[1] or self.is_packed:
            raise ShapeError(
                f"transposed: {self.cast} has tiles that do not transpose, or packed codes. "
                "Quantize the transposed tensor instead.",
                code="qtensor.transposed",
            )
        return QTensor(
            data=self.data.T, scale=self.scale.T, cast=self.cast, inner=self.data.shape[0], global_scale=self.global_scale, checked=True
        )  # fmt: skip


class SwizzledQTensor(QTensor):
    """A QTensor of MX or NVFP4 whose cast wrote its scales for the tensor cores alone.

    `scale` decodes them when it is first read. `replace` makes a QTensor without `units`.
    """

    @classmethod
    def of_units(
        cls, data: Tensor, units: Tensor, cast: Cast, inner: int, global_scale: Tensor | None = None
    ) -> SwizzledQTensor:
        """units: uint8, flat; for each row of the tensor, also where tiles have several."""
        self = object.__new__(cls)
        self.__dict__.update(
            data=data, units=units, cast=cast, inner=inner, global_scale=global_scale
        )
        return self

    @property
    def scale(self) -> Tensor:
        if "decoded" not in self.__dict__:
            rows, columns = self.data.shape[0], scale_shape(self.shape, self.cast.tile)[1]
            assert self.units is not None
            codes = unswizzled(self.units, rows, columns)[:: self.cast.tile[0]]
            self.__dict__["decoded"] = (
                codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
                if self.cast.scale.two_level
                else from_exponents(codes)
            )
        decoded: Tensor = self.__dict__["decoded"]
        return decoded

    @scale.setter
    def scale(self, value: Tensor) -> None:
        self.__dict__["decoded"] = value

    @property
    def nbytes(self) -> int:
        extra = 0 if self.global_scale is None else self.global_scale.nbytes
        scales = self.scale if self.units is None else self.units
        return self.data.nbytes + scales.nbytes + extra


class FoldedQTensor(QTensor):
    """An expanded QTensor whose cast multiplied the values by the scales of their tiles, exactly.

    `data` divides by them again when it is first read, which is exact, too. `replace` makes a
    QTensor that is not folded.

    folded  [outer, inner] float32 or bfloat16: values times the scales of their tiles, and not
            times `global_scale`
    span    (lowest, highest): folded values other than 0 are at least 2**lowest and below
            2**highest, and so are values of the format
    """

    folded: Tensor
    span: tuple[int, int]
    # Asked for often, and known without a division.
    is_expanded, is_packed = True, False

    def __new__(cls, **given: Any) -> Any:
        """Return a QTensor that is not folded, as `replace` asks for one; a copy is of this class."""
        return QTensor(**given) if given else object.__new__(cls)

    @classmethod
    def of_folded(
        cls, folded: Tensor, scale: Tensor, cast: Cast, inner: int, span: tuple[int, int],
        global_scale: Tensor | None = None,
    ) -> FoldedQTensor:  # fmt: skip
        self = object.__new__(cls)
        self.__dict__.update(
            folded=folded, scale=scale, cast=cast, inner=inner, global_scale=global_scale, span=span
        )
        return self

    @property
    def memory(self) -> Tensor:
        return self.folded

    @property
    def shape(self) -> tuple[int, int]:
        return self.folded.shape[0], self.inner

    @property
    def device(self) -> torch.device:
        return self.folded.device

    @property
    def data(self) -> Tensor:
        if "plain" not in self.__dict__:
            # A scale of two levels may be 0, and its values are.
            divisors = torch.where(self.scale == 0, 1.0, self.scale)
            each = times_scale(torch.ones_like(self.folded), divisors, self.cast.tile)
            self.__dict__["plain"] = self.folded / each
        plain: Tensor = self.__dict__["plain"]
        return plain

    def transposed(self) -> QTensor:
        """As QTensor; a view of the folded values."""
        if self.cast.tile[0] != self.cast.tile[1]:
            return super().transposed()
        return FoldedQTensor.of_folded(
            self.folded.T,
            self.scale.T,
            self.cast,
            self.folded.shape[0],
            self.span,
            self.global_scale,
        )
