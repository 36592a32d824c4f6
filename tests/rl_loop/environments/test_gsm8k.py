"""GSM8K: published rows, and answers as models write them."""

from __future__ import annotations

import asyncio

import pytest

from rl_loop.environments import RewardConfig, arithmetic
from rl_loop.environments.base import final
from rl_loop.environments.gsm8k import Gsm8kEnvironment, Gsm8kOptions

ROW = {
    "question": "How many dollars?",
    "answer": "He has 2*500=<<2*500=1000>>1,000 dollars.\n#### 1,000",
}


@pytest.mark.parametrize(
    ("boxed", "reward"),
    [
        ("1000", 1.0),
        ("1,000", 1.0),
        (r"\$1000", 1.0),
        ("$1,000.00$", 1.0),
        ("1{,}000", 1.0),
        (r"1000\text{ dollars}", 1.0),
        ("999", -1.0),
        (r"\$1001", -1.0),
        ("", -1.0),
    ],
)
def test_an_answer_counts_however_its_number_is_written(boxed: str, reward: float) -> None:
    task = Gsm8kEnvironment.from_record(ROW, "gsm8k-0", Gsm8kOptions())
    environment = Gsm8kEnvironment(task, arithmetic.interpret, RewardConfig())
    assert asyncio.run(environment.step([final(rf"So \boxed{{{boxed}}}.")])).reward == reward
