"""Grammars of Harmony turns, in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping

from rl_loop.chat.tools import FUNCTIONS
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, Vocabulary, model_special_id


def turn_grammar(vocabulary: Vocabulary, answer: str | None, arguments: Mapping[str, str]) -> str:
    """Return a grammar of turns with a JSON answer, or with one call of a client's function.

    Thoughts before the answer or the call are one analysis message. Its text is not constrained.

    Args:
        vocabulary: token ids of the model.
        answer: JSON schema of the answer. None if the turn must be a call.
        arguments: JSON schema of the arguments, by the name of the function.
    """
    tokens = {name: f"<[{model_special_id(vocabulary, name)}]>" for name in SPECIAL_TOKENS}
    channel, message = tokens["<|channel|>"], tokens["<|message|>"]
    end, start = tokens["<|end|>"], tokens["<|start|>"]
    rules = [
        f'thoughts: {channel} "analysis" {message} TEXT {end} {start} "assistant"',
        r"TEXT: /(.|\n)*/",
    ]
    turns = []
    if answer is not None:
        turns.append("answer")
        rules.append(f'answer: {channel} "final" {message} json {tokens["<|return|>"]}')
        rules.append(f"json: %json {answer}")
    for number, (name, schema) in enumerate(arguments.items()):
        header = json.dumps(f"commentary to={FUNCTIONS}{name} ", ensure_ascii=False)
        written = f'{channel} {header} {tokens["<|constrain|>"]} "json" {message}'
        turns.append(f"call_{number}")
        rules.append(f"call_{number}: {written} arguments_{number} {tokens['<|call|>']}")
        rules.append(f"arguments_{number}: %json {schema}")
    return "\n".join([f"start: thoughts? ({' | '.join(turns)})", *rules])
