"""Output of ``gptoss data preview``: samples with loss masks, counts, lengths and rejections."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console

from launch.token_display import color_tokens, print_line, token_lines
from rl_loop.chat.codec import ChatCodec
from rl_loop.conversations.dataset import ConversationData, Preview
from rl_loop.conversations.rejections import describe_kinds
from rl_loop.conversations.source_stream import DataSample

SHOWN_REJECTIONS = 10
BAR_WIDTH = 40


def print_preview(
    data: ConversationData,
    codec: ChatCodec,
    console: Console,
    *,
    sources: Sequence[str],
    samples: int,
    conversations: int,
) -> bool:
    """Print samples and statistics of every source.

    Args:
        data: conversations.
        codec: decodes tokens.
        console: output.
        sources: names of the sources.
        samples: number of samples to print per source.
        conversations: number of conversations to read per source, for the statistics.

    Returns:
        True if every source has at least one sample.
    """
    all_learn = True
    for source in sources:
        preview = data.preview(source, conversations)
        all_learn = all_learn and bool(preview.samples)
        for number, sample in enumerate(preview.samples[:samples], start=1):
            _print_sample(number, sample, codec, console)
        for line in statistics_lines(preview):
            print_line(line, console)
    return all_learn


def _print_sample(number: int, sample: DataSample, codec: ChatCodec, console: Console) -> None:
    trained = int(np.count_nonzero(sample.loss_mask))
    title = f"sample {number}: {sample.name}; {len(sample.token_ids)} tokens, {trained} trained"
    print_line(title, console, style="bold")

    # Colors are lost in a file, so write the mask as a word there.
    if console.is_terminal:
        console.print(color_tokens(sample.token_ids, sample.loss_mask, codec), highlight=False)
    else:
        for line in token_lines(sample.token_ids, sample.loss_mask, codec):
            print_line(line, console)
    console.print()


def statistics_lines(preview: Preview) -> Iterator[str]:
    """Yield lines with counts, lengths and rejections of a source."""
    rejected = len(preview.rejections)
    yield (
        f"{preview.source} ({preview.location}): {preview.conversations:,} conversations read, "
        f"{len(preview.samples):,} samples, {rejected:,} rejected"
    )
    for rejection in preview.rejections[:SHOWN_REJECTIONS]:
        yield f"  rejected: {rejection}"
    if rejected > SHOWN_REJECTIONS:
        yield f"  ... in all {describe_kinds(preview.kinds)}"

    if preview.samples:
        lengths = np.array([len(sample.token_ids) for sample in preview.samples])
        trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in preview.samples)
        tokens = int(lengths.sum())
        yield (
            f"  {tokens:,} tokens, {trained:,} trained ({trained / tokens:.0%}); per sample "
            f"{np.median(lengths):,.0f} in the median, {lengths.max():,} at most"
        )
        yield from histogram(lengths)


def histogram(lengths: np.ndarray) -> Iterator[str]:
    """Yield a bar per range of ``lengths``, int [samples]. The upper bounds are powers of 2."""
    # At least 2, because log2(1) = 0 would give the range from 1 to 1.
    upper = 2 ** np.ceil(np.log2(np.maximum(lengths, 2))).astype(int)
    counts = {
        int(bound): int(count)
        for bound, count in zip(*np.unique(upper, return_counts=True), strict=True)
    }
    most = max(counts.values())

    # Empty ranges between get a line, too, so that the axis has no gaps.
    bound = min(counts)
    while bound <= max(counts):
        count = counts.get(bound, 0)
        bar = "#" * round(BAR_WIDTH * count / most)
        # A few samples next to thousands would round to an empty bar.
        if count > 0 and not bar:
            bar = "."
        yield f"  {bound // 2 + 1:>7,} - {bound:>7,} tokens  {bar:{BAR_WIDTH}}  {count:,}"
        bound *= 2
