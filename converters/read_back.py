"""Reads a conversion back from its finished files and compares it with the source, before it gets its name.

The expected values are computed a second time, by other objects than those that wrote, from the source's files. What
was written is brought back with the other direction of the name table (an import is compared as Hugging Face tensors,
an export as Megatron parameters). The MXFP4 codec is used by one thread at a time, and a few rows of every expert are
also computed from the format's definition.

A sample is read while the system is still taking what was written to the disk, which a conversion has to wait for
anyway: it comes from the system's cache, as far as that holds it. All is read when it is on the disk, and from there.

What this cannot see: a name table that is wrong in both directions (``verify`` can), an MXFP4 codec that is always
wrong in some rows but right in those that are computed from the definition, and source files that were damaged before.
A sample does not see values of experts of the other layers (that these have their place and length in the files is
checked), nor a disk that does not keep what it was given."""

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from converters.bits import FileRange, as_bytes, same_bits, same_in_files
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import BLOCK, is_expert_matrix
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.mxfp4_export import quantise
from converters.names import ParameterMapping, parameter_mappings
from converters.new_directory import final_name
from converters.pipeline import Progress, bf16_bytes, in_order
from converters.reports import Check, ExportReport, QuantisationError, ReadBack
from gptoss_kernels.cache import cache_directory, write_atomically
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.durable_files import directory_syncing

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth is the sign (OCP Microscaling Formats 1.0, table 5)."""
ROWS_BY_DEFINITION = 4
"""Rows of each expert matrix that are also computed without the codec."""


def check_import(
    hf_dir: Path, partial: Path, dtype: torch.dtype | None, check: Check, progress: Progress | None = None
) -> ReadBack:
    """Compare the torch_dist checkpoint ``partial``, which has not got its name yet, with the directory ``hf_dir``.

    ``dtype`` is what weights were converted to; None if each kept its own. Raises ConversionError naming tensor, expert
    and file."""
    source = HfDirectory(hf_dir)
    written = MegatronCheckpoint(partial, unfinished=True, from_disk=check == "all")
    if written.config != source.config:
        raise ConversionError(f"{final_name(partial)}: its model configuration is not that of {hf_dir}")
    written.check_places()
    codec = threading.Lock()

    def compare(mapping: ParameterMapping) -> None:
        if mapping.is_unchanged and dtype is None:
            ranges = written.file_range(mapping), source.file_range(mapping.hf_names[0])
            if unchanged(*ranges, from_disk=check == "all"):
                return
        where = Place(mapping, final_name(partial), written.file_of(mapping))
        with where.errors():
            parts = mapping.named_parts(written.parameter(mapping))
        for name, part in parts.items():
            with codec:
                expected = source.get(name, mapping.expert)
            where.compare(name, part, expected if dtype is None else expected.to(dtype))

            packed = source.quantised(name, mapping.expert)
            if packed is not None:
                blocks, scales = (rows_of(tensor) for tensor in packed)
                where.compare(name, rows_of(part.mT), defined_values(blocks, scales).to(part.dtype))

    return _read_back("import", source.config, partial, check, compare, lambda mapping, result: None, progress)


def check_export(
    megatron_dir: Path,
    partial: Path,
    dtype: torch.dtype | None,
    reference: Path | None,
    report: ExportReport,
    check: Check,
    progress: Progress | None = None,
) -> ReadBack:
    """Compare the Hugging Face directory ``partial``, which has not got its name yet, with a torch_dist checkpoint.

    ``dtype`` of the weights; None if experts are MXFP4, with the scales of ``reference`` where they fit, and the rest
    bf16. ``report`` says what that cost, and is compared with what it cost by the second computation. Raises
    ConversionError naming tensor, expert and file."""
    checkpoint = MegatronCheckpoint(megatron_dir)
    written = HfDirectory(partial, unfinished=True, from_disk=check == "all")
    original = None if reference is None else HfDirectory(reference)
    claims, codec = ExportReport(), threading.Lock()

    def compare(mapping: ParameterMapping) -> QuantisationError | None:
        if mapping.is_unchanged:
            there, here = written.file_range(mapping.hf_names[0]), checkpoint.file_range(mapping)
            wanted = here is not None and here.dtype == (dtype or torch.bfloat16)
            if wanted and unchanged(there, here, from_disk=check == "all"):
                return None
        exact = checkpoint.parameter(mapping)
        where = Place(mapping, final_name(partial), written.file_of(mapping.hf_names[0]))
        if dtype is None and mapping.expert is not None and is_expert_matrix(mapping.hf_names[0]):
            return compare_mxfp4(mapping, exact, where)

        with where.errors():
            parts = {name: written.get(name, mapping.expert) for name in mapping.hf_names}
        expected = exact.to(dtype or torch.bfloat16)
        if not same_bits(mapping.to_megatron(*parts.values()), expected):
            for name, part in mapping.named_parts(expected).items():
                where.file = written.file_of(name)
                where.compare(name, parts[name], part)
            raise ConversionError(f"the two directions of the name table do not agree about {mapping.name}")
        return None

    def compare_mxfp4(mapping: ParameterMapping, exact: torch.Tensor, where: "Place") -> QuantisationError:
        [name], [matrix] = mapping.hf_names, mapping.to_hf(exact)
        assert mapping.expert is not None
        with codec:
            expected, error = quantise(name, mapping.expert, matrix, original)
        with where.errors():
            packed = written.quantised(name, mapping.expert)
        assert packed is not None  # HfDirectory refuses a directory that does not hold what its config.json says
        for (stored_name, values), part in zip(expected.items(), packed, strict=True):
            where.file = written.file_of(stored_name)
            where.compare(stored_name, part, values)

        blocks, scales = (rows_of(tensor) for tensor in packed)
        defined, wanted = defined_values(blocks, scales), rows_of(matrix.mT.to(torch.bfloat16))
        if (error.changed == 0 and not torch.equal(defined, wanted.float())) or not nearest(defined, wanted, scales):
            raise ConversionError(
                f"{where}: its MXFP4 blocks do not stand for the numbers nearest to those of {megatron_dir}: the "
                f"codec of this machine is wrong; nothing was kept"
            )
        return error

    def claim(mapping: ParameterMapping, error: QuantisationError | None) -> None:
        if error is not None:
            claims.add(mapping.hf_names[0], error)

    kind = "export_mxfp4" if dtype is None else f"export_{dtype}".replace("torch.", "")
    result = _read_back(kind, checkpoint.config, partial, check, compare, claim, progress)
    for name, claimed in claims.errors.items():
        if not claimed.is_close_to(report.errors.get(name)):
            raise ConversionError(
                f"{final_name(partial)}: the loss of {name} by quantisation was reported as {report.errors.get(name)}, "
                f"but is {claimed}; nothing was kept. Convert again"
            )
    return result


def check_weights(
    weights: Mapping[str, torch.Tensor], partial: Path, check: Check, progress: Progress | None = None
) -> ReadBack:
    """Compare the Hugging Face directory ``partial``, which has not got its name yet, with ``weights``, by name.

    Raises ConversionError naming tensor, expert and file."""
    written = HfDirectory(partial, unfinished=True, from_disk=check == "all")

    def compare(mapping: ParameterMapping) -> None:
        for name in mapping.hf_names:
            where = Place(mapping, final_name(partial), written.file_of(name))
            with where.errors():
                part = written.get(name, mapping.expert)
            where.compare(name, part, weights[name] if mapping.expert is None else weights[name][mapping.expert])

    return _read_back("weights", written.config, partial, check, compare, lambda mapping, result: None, progress)


def _read_back[Result](
    kind: str,
    config: ModelConfig,
    partial: Path,
    check: Check,
    compare: Callable[[ParameterMapping], Result],
    use: Callable[[ParameterMapping, Result], None],
    progress: Progress | None,
) -> ReadBack:
    """Compare what ``check`` asks for, on all cores; ``use`` gets the results in the order of the name table.

    ``partial`` is on the disk on return."""
    table = list(parameter_mappings(config).values())
    layer = None if check == "all" else next_layer(kind, config)
    chosen = [mapping for mapping in table if mapping.expert is None or layer in (None, mapping.layer)]

    with torch.no_grad(), directory_syncing(partial) as synced:
        if check == "all":
            synced()
        began = time.perf_counter()
        with contextlib.closing(in_order(compare, chosen, bf16_bytes, progress)) as results:
            for mapping, result in zip(chosen, results, strict=True):
                use(mapping, result)
        ended = time.perf_counter()
    added = ended - max(began, min(ended, synced()))

    if layer is not None:
        remember_layer(kind, config, layer)  # only now: what failed is looked at again
    compared, parameters = (sum(math.prod(mapping.shape) for mapping in part) for part in (chosen, table))
    return ReadBack(
        check,
        layer,
        config.num_layers,
        compared=compared,
        parameters=parameters,
        seconds=ended - began,
        added_seconds=added,
    )


# -- whose turn it is -------------------------------------------------------------------------------------------------


def next_layer(kind: str, config: ModelConfig) -> int:
    """The layer after the one whose experts the last conversion of this ``kind`` and size of model compared here.

    It is remembered in the user's cache. Where nothing is remembered, or nothing can be, it is any layer."""
    try:
        return (int(_turn_file(kind, config).read_text()) + 1) % config.num_layers
    except (OSError, ValueError):
        return random.SystemRandom().randrange(config.num_layers)


def remember_layer(kind: str, config: ModelConfig, layer: int) -> None:
    """Say whose turn it was."""
    with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to refuse a good conversion
        file = _turn_file(kind, config)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, str(layer).encode())


def _turn_file(kind: str, config: ModelConfig) -> Path:
    name = f"{kind}_{config.num_layers}_layers_{config.num_experts}_experts_{config.hidden_size}_wide"
    return cache_directory() / "layer_read_back_last" / name


# -- comparing --------------------------------------------------------------------------------------------------------


def unchanged(written: FileRange | None, source: FileRange | None, from_disk: bool) -> bool:
    """Whether a tensor that is only copied is the same in both files. If not, reading it says what is wrong."""
    if written is None or source is None:
        return False
    try:
        return same_in_files(written, source, from_disk)
    except OSError:
        return False


@dataclass
class Place:
    """Where a parameter was written, for messages."""

    mapping: ParameterMapping
    directory: Path
    """The name that the directory would have got."""
    file: str

    def __str__(self) -> str:
        return self.of(", ".join(self.mapping.hf_names))

    def of(self, name: str) -> str:
        expert = "" if self.mapping.expert is None else f", expert {self.mapping.expert}"
        return f"{self.directory / self.file}: tensor {name}{expert}"

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """A ConversionError from inside says of which tensor and expert it is."""
        try:
            yield
        except ConversionError as error:
            raise ConversionError(f"{self} cannot be read back ({error}); nothing was kept") from None

    def compare(self, name: str, written: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise ConversionError if the two are not the same bit for bit."""
        if same_bits(written, expected):
            return
        if written.dtype != expected.dtype or written.shape != expected.shape:
            what = f"was written as {written.dtype} {list(written.shape)}, not {expected.dtype} {list(expected.shape)}"
        else:
            different = as_bytes(written) != as_bytes(expected)
            elements = different.reshape(-1, written.element_size()).any(-1)
            what = (
                f"holds something else than was to be written in {int(elements.sum()):,} of {len(elements):,} values, "
                f"the first of them number {int(elements.argmax()):,}"
            )
        raise ConversionError(
            f"{self.of(name)} {what}; nothing was kept. Convert again; if it happens again, check memory and disk of "
            "this machine"
        )


def rows_of(matrix: torch.Tensor) -> torch.Tensor:
    """The first and the last row and two between."""
    return matrix[torch.linspace(0, len(matrix) - 1, ROWS_BY_DEFINITION).long()]


def defined_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, n * 32] that MXFP4 blocks [rows, n, 16] and scales [rows, n] stand for, by definition.

    fp32 holds all of them; scales above 252 do not occur (HfDirectory refuses what bf16 cannot hold)."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes & 7]
    signs = 1.0 - 2.0 * (codes >> 3)
    return (signs * magnitudes * _powers(scales)).float().flatten(-2)


def nearest(values: torch.Tensor, wanted: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether MXFP4 ``values`` [rows, n * 32] are, with their scales [rows, n], as near to ``wanted`` as can be."""
    unit = _powers(scales)
    off = (values.double() - wanted.double()).abs().unflatten(-1, (-1, BLOCK)) / unit
    size = wanted.double().abs().unflatten(-1, (-1, BLOCK)) / unit

    # neighbouring values are 0.5 apart up to 2, 1 up to 4, and 2 up to 6
    furthest = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
    return bool((off <= furthest).all())


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """fp64 [rows, n, 1]: 2 ** (scale - 127)."""
    return torch.exp2(scales.double() - 127)[..., None]
