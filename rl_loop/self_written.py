"""Conversations that a ChatML model writes itself, for distillation into another model.

The model writes questions and answers, or only answers to the questions of a data file. To write a
question, it continues the header of a user's turn (Magpie, arXiv 2406.08464). Tokens are sampled
from the whole distribution, because distillation compares whole distributions.

Each conversation is a line in the format ``messages``. The system message is left out. It is that
of the model's chat template, so ``chatml.system`` must have the same text in training.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.hf_directory import HfDirectory
from megatron_gptoss.named_random import named_generator
from megatron_gptoss.untrusted_files import UntrustedFileError, check_regular
from rl_loop.chat.tokenizer_vocabulary import read_tokenizer
from rl_loop.chatml.vocabulary import END_OF_TEXT, IM_END, IM_START
from rl_loop.conversations.errors import ConversationError, DataError
from rl_loop.conversations.rows import open_rows
from rl_loop.data.untrusted_data import read_line

USER = f"{IM_START}user\n"
"""Header of a user's message."""
ROW_START = b'{"messages": [{"role": "user"'
"""Start of every line that is written."""
GPU_BATCH, CPU_BATCH = 1024, 16
"""Default numbers of conversations that are written at the same time."""
MAX_EMPTY_BATCHES = 3
"""Successive batches without a conversation after which the command gives up."""


@dataclass(frozen=True)
class WritingOptions:
    """Sampling of the conversations."""

    batch_size: int | None = None
    """Number of conversations to write at the same time. Default: GPU_BATCH or CPU_BATCH."""
    max_tokens: int = 400
    """Maximum tokens of a message. A longer message is cut off."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass(frozen=True)
class WrittenConversations:
    """Content of a conversation file."""

    questions: list[str]
    """User's message of every line."""
    size: int
    """Bytes of the complete lines. An interrupted write may leave a part of a line after them."""


def write_conversations(
    model_dir: Path,
    target: Path,
    questions: Sequence[str] | int,
    options: WritingOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Append conversations to a file until it has all of them.

    An interrupted call continues where it stopped. A complete file is not changed.

    Args:
        model_dir: Hugging Face directory of a ChatML model.
        target: JSONL file to write.
        questions: questions to answer, or the number of conversations to write.
        options: sampling.
        progress: function of (conversations in the file, conversations wanted).

    Returns:
        Number of questions without a line: the model wrote an empty message, or the call gave up
        before it asked them.

    Raises:
        DataError: if this command did not write the file, or a question is too long for the model.
        ConversionError, TokenizerError: if the model cannot be read.
    """
    written = read_written(target)
    pending = _missing(questions, written, target)
    total = len(written.questions) + len(pending)
    progress(len(written.questions), total)
    if not pending:
        return 0

    model = ChatMlModel(model_dir, options.max_tokens)
    # All at once, because a late question that is too long would stop the command after hours.
    model.check_lengths([question for question in pending if question is not None])
    batch_size = options.batch_size or (GPU_BATCH if model.device == "cuda" else CPU_BATCH)

    target.parent.mkdir(parents=True, exist_ok=True)
    count, empty_batches = len(written.questions), 0
    with target.open("ab") as file:
        file.truncate(written.size)
        while pending and empty_batches < MAX_EMPTY_BATCHES:
            batch = [pending.popleft() for _ in range(min(batch_size, len(pending)))]
            # A continued file must not repeat the samples of its first lines.
            place = f"line {count}, attempt {empty_batches}"
            torch.manual_seed(named_generator(options.seed, place).initial_seed())
            chats = model.write(batch)

            lines = [json.dumps({"messages": chat}) + "\n" for chat in chats if chat is not None]
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            # Another attempt, after the other questions, because the sample will differ.
            pending += [asked for asked, chat in zip(batch, chats, strict=True) if chat is None]
            empty_batches = 0 if lines else empty_batches + 1
            count += len(lines)
            progress(count, total)
    if count == 0:
        raise DataError(
            f"{model_dir}: the model wrote only empty messages. Use a model that was trained on "
            "conversations in ChatML"
        )
    return len(pending)


def read_questions(location: str, column: str) -> list[str]:
    """Read the questions of a data file.

    Args:
        location: .jsonl or .parquet file, or a data set of the hub ("hub:NAME:SPLIT").
        column: column of the questions.

    Raises:
        DataError: if the file cannot be read, or a row has no question.
    """
    rows = open_rows(location)
    questions = []
    for block in rows.blocks:
        for row in rows.read(block):
            where = f"{location}, {rows.unit} {row.number}"
            try:
                record = row.parse({})
            except ConversationError as error:
                raise DataError(f"{where}: {error}") from None
            if not isinstance(record, dict) or column not in record:
                keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no columns"
                raise DataError(
                    f"{where}: there is no column {column!r}, but {keys}. Set --column to the "
                    "column of the questions"
                )
            question = record[column]
            if not isinstance(question, str) or not question.strip():
                raise DataError(f"{where}: {column} is not a text ({question!r}). Remove the row")
            questions.append(question.strip())
    return questions


def read_written(path: Path) -> WrittenConversations:
    """Read a file that an earlier call has written; empty if there is none.

    Raises:
        DataError: if this command did not write the file, or it cannot be read.
    """
    questions: list[str] = []
    size = 0
    try:
        check_regular(path)
        with path.open("rb") as file:
            while line := read_line(file, len(questions) + 1):
                if not line.endswith(b"\n") and _may_be_cut_off(line):
                    break
                questions.append(_parse_question(line))
                size += len(line)
    except FileNotFoundError:
        return WrittenConversations([], 0)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UntrustedFileError as error:
        raise DataError(str(error)) from None
    # ``read_line`` raises a ValueError for a line that is too long, which this command did not
    # write either.
    except ValueError as error:
        raise DataError(
            f"{path}, line {len(questions) + 1}: this command did not write the line ({error}). Name a "
            "new file"
        ) from None
    return WrittenConversations(questions, size)


def _may_be_cut_off(line: bytes) -> bool:
    """Return True if a last line without a line break is the start of a written line."""
    return line.startswith(ROW_START) or ROW_START.startswith(line)


def _parse_question(line: bytes) -> str:
    """Return the question of a line. Raises ValueError if it has another form."""
    try:
        user, assistant = json.loads(line)["messages"]
        if (user["role"], assistant["role"]) == ("user", "assistant"):
            return str(user["content"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError("it must have one question and one answer")


def _missing(
    questions: Sequence[str] | int, written: WrittenConversations, path: Path
) -> deque[str | None]:
    """Return the questions without a line. None: the model writes the question.

    Raises:
        DataError: if the file has an answer to another question.
    """
    if isinstance(questions, int):
        return deque([None] * (questions - len(written.questions)))

    # Counted, because a question may occur several times and gets an answer each time.
    answered = Counter(written.questions)
    missing: deque[str | None] = deque()
    for question in questions:
        if answered[question] > 0:
            answered[question] -= 1
        else:
            missing.append(question)
    for number, question in enumerate(written.questions, start=1):
        if answered[question] > 0:
            raise DataError(
                f"{path}, line {number}: the question is not in --prompts. Name a new file"
            )
    return missing


class ChatMlModel:
    """ChatML model that writes user's messages and answers."""

    def __init__(self, directory: Path, max_tokens: int) -> None:
        """Load a model onto the GPU in bf16, or onto the CPU in fp32.

        Args:
            directory: Hugging Face directory.
            max_tokens: maximum tokens of a message.

        Raises:
            ConversionError, TokenizerError: if the model cannot be read.
            DataError: if it has no chat template of ChatML, or too few positions.
        """
        # Read config and tokenizer first: their errors name a missing file, for which transformers
        # would search the hub.
        self._max_length = HfDirectory(directory).config.max_length
        read_tokenizer(directory)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        # Padded on the left, because generate continues every row after its last column.
        self._tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        added = self._tokenizer.get_added_vocab()
        self._added_ids = frozenset(added.values())
        self._ends = [added[name] for name in (IM_END, END_OF_TEXT) if name in added]
        # The template adds the system message before the header of the user's message.
        if self._tokenizer.chat_template is None or USER not in (example := self._prompt("x")):
            raise DataError(
                f"{directory}: the chat template is missing, or is not ChatML. Use the directory "
                "of a ChatML model with its chat_template.jinja"
            )
        self._header = example[: example.index(USER) + len(USER)]
        self._where = directory
        self._max_tokens = max_tokens
        # Question and answer may each have max_tokens.
        self._check_length(example, 2 * max_tokens, "the header of a conversation")

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(self.device).eval()

    def check_lengths(self, questions: Sequence[str]) -> None:
        """Raise DataError if a question and its answer exceed the model's positions."""
        for question in questions:
            self._check_length(self._prompt(question), self._max_tokens, repr(question[:40]))

    def write(self, questions: Sequence[str | None]) -> list[list[dict[str, str]] | None]:
        """Return a conversation for each question. None where the model wrote an empty message.

        Args:
            questions: user's messages. None for one that the model writes.
        """
        headers = [self._header for question in questions if question is None]
        new = iter(self._continue(headers))
        asked = [(next(new) if question is None else question).strip() for question in questions]

        answers = iter(self._continue([self._prompt(text) for text in asked if text]))
        chats: list[list[dict[str, str]] | None] = []
        for text in asked:
            answer = next(answers) if text else ""
            user = {"role": "user", "content": text}
            assistant = {"role": "assistant", "content": answer}
            chats.append([user, assistant] if answer.strip() else None)
        return chats

    def _prompt(self, question: str) -> str:
        """Return the text of a conversation up to the header of the answer."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def _check_length(self, prompt: str, new_tokens: int, name: str) -> None:
        tokens = len(self._tokenizer(prompt, add_special_tokens=False).input_ids)
        if tokens + new_tokens > self._max_length:
            raise DataError(
                f"--max-tokens: {name} has {tokens:,} tokens with its headers, and {new_tokens:,} "
                f"follow, but {self._where} has {self._max_length:,} positions. Lower --max-tokens"
            )

    def _continue(self, prompts: Sequence[str]) -> Iterator[str]:
        """Yield a sampled continuation of each prompt, up to the end of the message or the limit.

        Raises:
            DataError: if the GPU's memory is too small.
        """
        if not prompts:
            return

        inputs = self._tokenizer(
            list(prompts), return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self.device)
        try:
            with torch.no_grad():
                outputs = self._model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    do_sample=True,
                    # All three, because the model's generation_config.json may have other values,
                    # with which generate would sample from a changed distribution.
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=self._max_tokens,
                    eos_token_id=self._ends,
                    # Any added token: decoding stops at the first one.
                    pad_token_id=self._ends[0],
                )
        except torch.OutOfMemoryError:
            raise DataError(
                f"--batch: {len(prompts)} conversations exceed the GPU's memory. Lower it"
            ) from None

        for sampled in outputs[:, inputs["input_ids"].shape[1] :].tolist():
            yield self._decode_text(sampled)

    def _decode_text(self, sampled: list[int]) -> str:
        """Decode up to the first added token. It ends the message, or has no place in it."""
        is_added = (i for i, token_id in enumerate(sampled) if token_id in self._added_ids)
        return str(self._tokenizer.decode(sampled[: next(is_added, len(sampled))]))
