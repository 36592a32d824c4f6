"""The text on which the activations of the dense model are measured."""

from pathlib import Path

from tokenizers import Tokenizer

from converters.errors import ConversionError
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, UntrustedFileError, read_bytes

MAX_TEXT_BYTES = 16 << 20
"""Size limit of a calibration text. Only the first ``max_length`` tokens of it are used."""

CALIBRATION_TEXT = """\
The lighthouse keeper counted the ships that passed before sunrise: three fishing boats, a ferry on
its way to the island, and a grey freighter that had waited two days for the fog to lift. "Is it
always this quiet?" asked his granddaughter. He laughed and poured the tea. "In winter you would
not say so. The storm of 1987 broke every window on the north side."

Question: A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs
$3.50. How much money does the baker earn in a day?
Answer: In the afternoon the baker sells 24 / 2 = 12 loaves. Altogether there are 24 + 12 = 36
loaves, so the baker earns 36 * 3.50 = 126 dollars.

def moving_average(values, width):
    total = 0.0
    averages = []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        averages.append(total / min(index + 1, width))
    return averages

Photosynthesis turns carbon dioxide and water into sugar and oxygen. The reaction needs light,
which chlorophyll absorbs mostly in the red and blue parts of the spectrum; leaves look green
because that part is reflected. In 1779 Jan Ingenhousz showed that plants release oxygen only in
sunlight.

To install the package, create a virtual environment, activate it, and run `pip install example`.
If the command fails, check your Python version first. Send questions to help@example.org or open
an issue, with the full error message and the output of `python --version`.
"""
"""Text on which activations are measured if the caller has none: prose, arithmetic and code."""


def calibration_tokens(source_dir: Path, text: str = CALIBRATION_TEXT) -> list[int]:
    """Tokenize a text with the tokenizer of a model directory.

    Raises:
        ConversionError: if there is no readable tokenizer.json.
    """
    path = source_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path, MAX_LISTING_BYTES))
    except FileNotFoundError:
        raise ConversionError(
            f"{path}: no such file, but the calibration text must be tokenized. Copy the model's "
            "tokenizer.json, which transformers writes with save_pretrained"
        ) from None
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except Exception as error:  # tokenizers raises no more specific type
        raise ConversionError(f"{path}: cannot be read ({error})") from None
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def read_calibration_text(path: Path) -> str:
    """Read a text file. Raises ConversionError."""
    try:
        return read_bytes(path, MAX_TEXT_BYTES).decode()
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path}: cannot be read as text ({error})") from None
