"""A turn that a person writes has the tokens that a policy would sample."""

from __future__ import annotations

import pytest

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary, TinyVocabulary

TURNS = [
    [final("7 boxes")],
    [think("It is odd."), final("Ünï 🫠\nsecond line")],
    [think("Look it up."), function_call("find", word="boxes", most=3)],
]
CODECS: dict[str, ChatCodec] = {
    "gptoss": Harmony(GptOssVocabulary(), PromptConfig()),
    "tiny": Harmony(TinyVocabulary(600, "7 boxes It is odd."), PromptConfig()),
    "chatml": ChatMl(tiny_vocabulary(600, "7 boxes It is odd."), ChatMlConfig()),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("turn", TURNS)
def test_text_of_a_turn_encodes_to_its_tokens(name: str, turn: list[ParsedMessage]) -> None:
    codec = CODECS[name]
    ids = codec.render_assistant(turn)
    assert codec.encode_sampled(codec.decode(ids)) == ids


@pytest.mark.parametrize("name", CODECS)
def test_special_token_in_arguments_is_a_format_error(name: str) -> None:
    """As text it is harmless. A person who types it writes the token, which ends the message."""
    codec = CODECS[name]
    name_of_end = codec.decode_token(codec.stop_token_ids[0])
    ids = codec.render_assistant([think("Look."), function_call("find", word=name_of_end)])
    assert not isinstance(codec.parse(ids), FormatError)
    typed = codec.encode_sampled(codec.decode(ids))
    assert typed != ids
    assert isinstance(codec.parse(typed), FormatError)
