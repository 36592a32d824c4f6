from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatron_gptoss.config import AdapterConfig, ParallelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.rope_scaling import YarnScaling
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config, load_config, value_origins
from rl_loop.config.rollout import RolloutConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.served import load_served_config
from rl_loop.config.shipped import find_config, shipped_files, shipped_names
from rl_loop.config.tinker import TinkerConfig

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", shipped_files("rl"), ids=lambda p: p.stem)
def test_every_rl_configuration_loads(path: Path) -> None:
    load_config(path, RlConfig)


@pytest.mark.parametrize("path", shipped_files("sft"), ids=lambda p: p.stem)
def test_every_sft_configuration_loads(path: Path) -> None:
    load_config(path, SftConfig)


@pytest.mark.parametrize("path", shipped_files("tinker"), ids=lambda p: p.stem)
def test_every_tinker_configuration_loads(path: Path) -> None:
    load_config(path, TinkerConfig)


def test_every_folder_of_configurations_is_shipped() -> None:
    folders = ("rl", "sft", "tinker", "cluster")
    files = {file for folder in folders for file in shipped_files(folder)}
    sections = {*CONFIGS.glob("model/*.yaml"), *CONFIGS.glob("algorithm/*.yaml")}
    assert files | sections == set(CONFIGS.rglob("*.yaml"))
    data_files = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]
    packaged = {
        file
        for patterns in data_files["data-files"].values()
        for pattern in patterns
        for file in CONFIGS.parent.glob(pattern)
    }
    assert packaged == set(CONFIGS.rglob("*.yaml"))


def test_untested_configurations_have_names_too() -> None:
    untested = CONFIGS / "untested/rl/gpt-oss-120b_8x8.yaml"
    assert find_config(Path("gpt-oss-120b_8x8"), "rl") == untested
    assert find_config(Path("untested/rl/gpt-oss-120b_8x8"), "rl") == untested
    assert "gpt-oss-120b_8x8" in shipped_names("rl")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)],
)
def test_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    import yaml

    from converters.names import hf_shapes

    model = GptOssModelConfig.model_validate(
        yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    )
    total = 0
    for shape in hf_shapes(model).values():
        count = 1
        for size in shape:
            count *= size
        total += count
    assert total == parameters


def test_a_dumped_configuration_loads_to_the_same(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["optimizer.lr=1e-5", "model.num_layers=2"]
    )
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config(file, RlConfig) == config
    assert config.optimizer.lr == 1e-5
    assert config.model.num_layers == 2


def test_the_last_of_several_model_overrides_wins() -> None:
    config = load_config(
        CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["model=gpt-oss-20b", "vocabulary=gptoss"]
    )
    assert config.model.num_experts == 32


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["seed=x", "rollout.worker=2"])
    assert "seed:" in str(error.value)
    assert "rollout.worker: unknown key" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"world_size": 2, "tensor": 2}, None),
        ({"world_size": 4, "tensor": 4}, "parallel.tensor (4) must divide num_key_value_heads"),
        ({"world_size": 3, "pipeline": 3}, "parallel.pipeline (3) must divide num_layers"),
        (
            {"world_size": 2, "pipeline": 2, "virtual_pipeline": 4},
            "parallel.pipeline x parallel.virtual_pipeline (8) must divide num_l",
        ),
        ({"virtual_pipeline": 2}, "parallel.virtual_pipeline (2) needs parallel.pipeline above 1"),
        (
            {"last_stage_layers": 2},
            "parallel.last_stage_layers (2) needs parallel.pipeline above 1",
        ),
        (
            {"recompute_layers": 2},
            "parallel.recompute_layers has no effect, because parallel.recompute is empty",
        ),
        (
            {"world_size": 3, "pipeline": 3, "last_stage_layers": 1},
            "parallel.pipeline - 1 (2) must divide num_layers - parallel.last_stage_layers",
        ),
        ({"world_size": 3, "expert": 3}, "parallel.expert (3) must divide num_experts"),
        ({"world_size": 2, "expert": 4}, "parallel.expert (4) must divide parallel.world_size / "),
        ({"world_size": 3, "tensor": 2}, "parallel.world_size (3)"),
    ],
)
def test_impossible_layouts_name_the_key(layout: dict[str, int], named: str | None) -> None:
    model = GptOssModelConfig(
        num_layers=4,
        num_experts=8,
        num_key_value_heads=2,
        num_attention_heads=8,
        hidden_size=64,
        vocab_size=128,
    )
    parallel = ParallelConfig(**layout)
    if named is None:
        parallel.check_layout(model)
        return
    with pytest.raises(ValueError) as error:
        parallel.check_layout(model)
    assert named in str(error.value)


def test_purification_with_sglang_needs_temperature_one() -> None:
    """SGLang scores only at temperature 1. Otherwise the first retried call would fail the run."""
    path = CONFIGS / "rl/tiny_retool.yaml"
    sglang = ["rollout.purification={}", "rollout.engine.type=sglang"]
    with pytest.raises(ConfigError, match=r"rollout\.purification .* Set rollout\.temperature=1"):
        load_config(path, RlConfig, [*sglang, "rollout.temperature=0.7"])
    load_config(path, RlConfig, [*sglang, "rollout.temperature=1"])
    load_config(path, RlConfig, ["rollout.purification={}", "rollout.temperature=0.7"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine.servers=2"], "rollout.engine.servers: unknown key"),
        (
            ["rollout.engine.type=sglang", "rollout.engine.max_batch_size=2"],
            "rollout.engine.max_batch_size: unknown",
        ),
        (
            ["rollout.engine.type=sglang", "rollout.engine.servers=0"],
            "rollout.engine.servers: Input should be greater",
        ),
        (
            ["rollout.engine.type=vllm"],
            "there is no rollout backend 'vllm'. Known names: embedded, sglang. For your own",
        ),
        (
            ["rollout.engine.type=nowhere:Backend"],
            "rollout backend 'nowhere:Backend' cannot be imported",
        ),
        (
            ["rollout.engine.type=pathlib:Path"],
            "expected a subclass of rl_loop.engines.backend.RolloutBackend",
        ),
    ],
)
def test_what_one_engine_knows_is_out_of_reach_of_the_others(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)


@pytest.mark.parametrize(
    "engine", ["{type: embedded, max_batch_size: 3}", "{type: sglang, servers: 2}"]
)
def test_a_dumped_engine_is_the_same_engine(engine: str, tmp_path: Path) -> None:
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, [f"rollout.engine={engine}"])
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config(file, RlConfig).rollout.engine == config.rollout.engine


@pytest.mark.parametrize("kind", [RlConfig, SftConfig])
def test_adapters_and_their_base_are_a_section_of_every_run(kind: type[RunConfig]) -> None:
    path = CONFIGS / kind.command / "tiny_retool.yaml"
    assert load_config(path, kind).adapter is None
    config = load_config(path, kind, ["adapter={rank: 4, targets: [q, v]}", "quantization=mxfp4"])
    assert config.adapter == AdapterConfig(rank=4, targets=("q", "v"))
    assert config.memory_inputs.adapter == config.adapter
    assert config.memory_inputs.has_mxfp4_base
    assert config.trained_quantization is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["initial_adapter=runs/a"], "initial_adapter (runs/a) has no effect while adapter is null"),
        (["training.keep_adapters=true"], "training.keep_adapters has no effect while adapter is null"),
        (["adapter={rang: 4}"], "adapter.rang: unknown key"),
        (["adapter={targets: []}"], "adapter.targets is empty"),
        (["adapter={targets: [gate]}"], "adapter.targets.0: Input should be 'q', 'k', 'v'"),
        (["adapter={rank: 100}"], "adapter.rank (100) exceeds the smaller dimension (64)"),
        (["adapter={rank: 8}", "model.intermediate_size=48", "quantization=mxfp4"],
         "quantization is mxfp4, which needs a multiple of 32 as intermediate_size"),
        (["adapter={targets: [q, o]}", "ablation.freeze=[attention]"],
         "adapter.targets (q, o) with ablation.freeze (attention): nothing is trained"),
        (["adapter={}", "ablation.freeze=[attention,experts]"],
         "adapter.targets (q, k, v, o, experts) with ablation.freeze (attention, experts): nothing"),
        (["adapter={targets: [head]}", "parallel.world_size=2", "parallel.pipeline=2"],
         "adapter.targets (head): pipeline stage 0 would have nothing to train"),
        (["ablation.freeze=[attention,experts]", "parallel.world_size=4", "parallel.pipeline=4",
          "model.num_layers=4"],
         "ablation.freeze (attention, experts): pipeline stages 1, 2 would have nothing to train"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_work_are_refused_with_their_key(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tiny_dense", [], "load_balancing_loss (0.01): a qwen2 model has no experts"),
        ("tiny_retool", ["adapter={rank: 4}"],
         "load_balancing_loss (0.01) needs trained routers. Add router to adapter.targets"),
        ("tiny_retool", ["ablation.freeze=[experts]"],
         "load_balancing_loss (0.01) needs trained routers. Remove experts from ablation.freeze"),
        ("tiny_retool", ["load_balancing_loss=-1"], "load_balancing_loss: Input should be greater"),
    ],
)  # fmt: skip
def test_loads_that_cannot_be_balanced_are_refused(
    name: str, overrides: list[str], message: str
) -> None:
    path = CONFIGS / f"sft/{name}.yaml"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(path, SftConfig, ["load_balancing_loss=0.01", *overrides])


def test_load_balancing_is_a_key_of_sft_only() -> None:
    balanced = ["load_balancing_loss=0.01", "adapter={rank: 4, targets: [experts, router]}"]
    assert load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, balanced).load_balancing == 0.01
    assert load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig).load_balancing == 0
    assert load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig).load_balancing == 0
    with pytest.raises(ConfigError, match="it has load_balancing_loss"):
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["load_balancing_loss=0.01"])


@pytest.mark.parametrize("kind", [RlConfig, SftConfig])
def test_quantization_is_a_key_of_every_run(kind: type[RunConfig]) -> None:
    path = CONFIGS / kind.command / "tiny_retool.yaml"
    assert load_config(path, kind).quantization is None
    config = load_config(path, kind, ["quantization=mxfp4"])
    assert config.trained_quantization == config.memory_inputs.quantization == "mxfp4"
    assert not config.memory_inputs.has_mxfp4_base


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantization=fp8"], "quantization: Input should be 'mxfp4'"),
        (["quantization=mxfp4", "model.hidden_size=144"],
         "quantization is mxfp4, which needs a multiple of 32 as hidden_size"),
        (["quantization=mxfp4", "ablation.engine_noise=0.1"], "cannot be added to experts in mxfp4"),
        (["rollout.engine.quantization=mxfp4", "model.intermediate_size=48"],
         "rollout.engine.quantization is mxfp4, which needs a multiple of 32 as intermediate_size"),
        (["rollout.engine={type: sglang, quantization: mxfp4}"],
         "hold only experts that were trained in this format, and quantization is null"),
        (["rollout.engine={type: sglang, quantization: mxfp4}", "quantization=mxfp4", "adapter={rank: 4}"],
         "and adapter.merge_experts (true) changes the values of experts. Leave it out, or set "
         "quantization=mxfp4 and adapter.merge_experts=false"),
        (["rollout.engine={type: sglang, arguments: [--quantization=mxfp4]}"],
         "rollout.engine.arguments: --quantization is not supported, because SGLang would ignore weight syncs"),
    ],
)  # fmt: skip
def test_quantization_that_cannot_work_is_refused_with_its_key(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)


UNMERGED = [
    "quantization=mxfp4",
    "adapter={rank: 4, merge_experts: false}",
    "dtype=bf16",
    "rollout.engine={type: sglang, quantization: mxfp4}",
]


def test_unmerged_adapters_train_beside_mxfp4_servers() -> None:
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, UNMERGED)
    assert config.unmerged_adapter == config.adapter
    assert config.trained_quantization is None
    merged = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["adapter={rank: 4}"])
    assert merged.unmerged_adapter is None
    # In fp32 an embedded engine may hold merged weights, and supervised training needs no engine.
    options = ["dtype=fp32", "rollout.engine={type: embedded, quantization: null}"]
    load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, [*UNMERGED, *options])
    load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, UNMERGED[:3])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantization=null"],
         "adapter.merge_experts (false) supports only a base in MXFP4, but quantization is null"),
        (["adapter={rank: 4, targets: [q], merge_experts: false}"],
         "adapter.merge_experts (false) has no effect: adapter.targets does not have experts"),
        (["rollout.engine={type: embedded}"],
         "adapter.merge_experts (false): embedded engines would hold merged experts in bf16"),
        (["rollout.engine.quantization=null"],
         "adapter.merge_experts (false): sglang engines would hold merged experts in bf16"),
        (["adapter={rank: 4, expert_rank: 17, merge_experts: false}"],
         "adapter.expert_rank (17) exceeds 16, the largest rank of unmerged adapters"),
        (["rollout.engine.keep_weights=true"],
         "rollout.engine.keep_weights applies to colocated servers only"),
        (["rollout.engine={type: sglang, quantization: mxfp4, colocated: true, keep_weights: true, weight_sync: disk}"],
         "rollout.engine.keep_weights has no effect with weight_sync=disk"),
        (["rollout.engine={type: sglang, quantization: mxfp4, colocated: true, keep_weights: true}",
          "adapter=null"],
         "rollout.engine.keep_weights: weight syncs send all weights unless adapter.merge_experts is false"),
    ],
)  # fmt: skip
def test_unmerged_adapters_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, [*UNMERGED, *overrides])


def test_bf16_servers_may_hold_values_of_quantized_runs() -> None:
    overrides = ["quantization=mxfp4", "rollout.engine={type: sglang}"]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)
    assert config.trained_quantization == "mxfp4"


@pytest.mark.parametrize(
    "overrides", [[], ["quantization=mxfp4"], ["quantization=mxfp4", "adapter={rank: 4}"]]
)
def test_embedded_engines_may_round_any_policy(overrides: list[str]) -> None:
    rounded = [*overrides, "rollout.engine.quantization=mxfp4"]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, rounded)
    assert config.rollout.engine.experts_format == "mxfp4"


def test_routed_experts_follow_routing_replay_unless_set() -> None:
    file = CONFIGS / "rl/tiny_retool.yaml"
    replay = "algorithm.routing_replay=R3"
    assert load_config(file, RlConfig, [replay]).rollout.routed_experts
    assert not load_config(file, RlConfig).rollout.routed_experts
    with pytest.raises(ConfigError, match=r"Set rollout\.routed_experts"):
        load_config(file, RlConfig, [replay, "rollout.routed_experts=false"])


def test_tiny_vocabulary_has_no_system_message_unless_set() -> None:
    prompt = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["prompt.channels=true"]).prompt
    assert (prompt.model_identity, prompt.channels, prompt.describe_builtin_tools) == (
        None,
        True,
        False,
    )
    dense = load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, ["chatml.describe_tools=true"])
    assert (dense.chatml.system, dense.chatml.describe_tools) == (None, True)
    released = load_config(CONFIGS / "rl/gpt-oss-20b_1x2.yaml", RlConfig)
    assert released.prompt.describe_builtin_tools


def test_frozen_part_may_have_adapters_beside_others() -> None:
    overrides = ["adapter={rank: 8}", "ablation.freeze=[experts]"]
    load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)


def test_copied_configuration_prefers_models_beside_it(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "mine/words.yaml"
    copy.parent.mkdir()
    copy.write_bytes((CONFIGS / "rl/tiny_gsm8k.yaml").read_bytes())
    loaded = load_config(copy, RlConfig)
    assert loaded == load_config(CONFIGS / "rl/tiny_gsm8k.yaml", RlConfig)
    origins = value_origins(copy, RlConfig, ["algorithm=grpo"])
    assert origins["model.vocab_size"] == str(CONFIGS / "model/tiny_words.yaml")
    assert origins["algorithm.advantage.type"] == str(CONFIGS / "algorithm/grpo.yaml")

    shipped = (CONFIGS / "model/tiny_words.yaml").read_text()
    beside = tmp_path / "model/tiny_words.yaml"
    beside.parent.mkdir()
    beside.write_text(re.sub("num_layers: .", "num_layers: 1", shipped))
    assert load_config(copy, RlConfig).model.num_layers == 1
    assert value_origins(copy, RlConfig)["model.num_layers"] == str(beside)

    with pytest.raises(
        ConfigError, match=r"tinny.yaml is neither in .*/model nor .* ones: gpt-oss-120b"
    ):
        load_config(copy, RlConfig, ["model=tinny"])


HF_CONFIGS = {
    "gpt_oss": GptOssModelConfig(num_layers=2, num_experts=4, hidden_size=64, max_length=4096),
    "qwen2": DenseModelConfig(
        model_type="qwen2", num_layers=2, hidden_size=64, intermediate_size=96,
        num_attention_heads=4, num_key_value_heads=2, head_size=16, vocab_size=512,
        rope_theta=1e6, max_length=2048,
        rope_scaling=YarnScaling(factor=4, original_max_position_embeddings=512),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", HF_CONFIGS)
@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_model_may_be_a_hugging_face_directory(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the working directory. Single values have origins and overrides."""
    expected = HF_CONFIGS[family]
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(expected.to_hf_config()))
    monkeypatch.chdir(tmp_path)
    file = CONFIGS / "sft/tiny_retool.yaml"
    chosen = [f"model={name}"]
    assert load_config(file, SftConfig, chosen).model == expected
    assert load_config(file, SftConfig, [*chosen, "model.num_layers=4"]).model.num_layers == 4
    origins = value_origins(file, SftConfig, chosen)
    assert origins["model.hidden_size"] == "model/config.json"
    assert "model" not in origins

    copy = tmp_path / "mine.yaml"
    copy.write_text(file.read_text().replace("model: tiny", f"model: {name}"))
    assert load_config(copy, SftConfig).model == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "qwen2"}', "model: M/config.json: key 'num_hidden_layers' is missing"),
        ('{"model_type": "mamba"}', "model: M/config.json: model_type is 'mamba', expected one of"),
        ('{"num_experts": 4}', "model: M/config.json: key 'experts_per_token' is missing"),
        ("layers: 4", "M/config.json"),
        (None, "model: M/config.json: no such file; expected a Hugging Face model directory"),
    ],
)
def test_model_names_file_and_key_when_it_is_wrong(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message.replace("M/", f"{tmp_path}/"))):
        load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, [f"model={tmp_path}"])


def test_what_is_served_may_be_named_as_the_shipped_ones_are() -> None:
    assert load_served_config(Path("tiny_retool")).name == "tiny_retool"
    assert load_served_config(Path("tiny_shop")).command == "sft"
    with pytest.raises(ConfigError, match="did you mean tiny_retool"):
        load_served_config(Path("tiny_retol"))


def test_served_config_with_only_data_is_an_sft_config(tmp_path: Path) -> None:
    """``data`` alone tells the command, because no other key of ``gptoss sft`` is required."""
    file = tmp_path / "chats.yaml"
    file.write_text("name: chats\nmodel: tiny\ndata: {path: chats.jsonl}\n")

    assert load_served_config(file).command == "sft"


@pytest.mark.parametrize(
    "name", [".", "..", ".hidden", "-x", "--resume", "a" * 300, "a/b", "a b", ""]
)
def test_run_name_cannot_leave_its_directory(name: str) -> None:
    """The name becomes a directory, a job's name and an argument of commands."""
    config = CONFIGS / "rl/tiny_retool.yaml"
    with pytest.raises(ConfigError, match="name: "):
        load_config(config, RlConfig, [f"name={json.dumps(name)}"])


def test_data_override_replaces_the_section() -> None:
    """If the sections were merged, the run would use files of the replaced data."""
    shop = load_config(CONFIGS / "sft/tiny_shop.yaml", SftConfig, ["data={path: chats.jsonl}"])
    assert shop.data is not None
    (source,) = shop.data.sources.values()
    assert (source.path, source.validation_path) == ("chats.jsonl", None)
    other = "tasks.sources={mine: {environment: retool}}"
    mine = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, [other])
    assert list(mine.tasks.sources) == ["mine"]
    merged = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["rollout={workers: 1}"])
    assert (merged.rollout.workers, merged.rollout.tasks_per_step) == (1, 12)


def test_held_out_data_belongs_to_its_training_data() -> None:
    file = CONFIGS / "sft/tiny_shop.yaml"
    with pytest.raises(
        ConfigError, match=r"data\.validation_path: runs/shop/held_out\.jsonl belongs"
    ):
        load_config(file, SftConfig, ["data.path=chats.jsonl"])
    for held_out in ("null", "held.jsonl"):
        changes = ["data.path=chats.jsonl", f"data.validation_path={held_out}"]
        assert load_config(file, SftConfig, changes).data is not None


SHORT_DATA = "{path: old.jsonl, validation_path: held.jsonl}"
LONG_DATA = f"{{sources: {{data: {SHORT_DATA}}}}}"


@pytest.mark.parametrize("data", [SHORT_DATA, LONG_DATA])
@pytest.mark.parametrize("change", ["data.path=new.jsonl", "data.sources.data.path=new.jsonl"])
def test_every_form_of_a_source_keeps_its_files_together(
    change: str, data: str, tmp_path: Path
) -> None:
    """``data.path`` and ``data.sources.data.path`` are one key, in the file and in overrides."""
    shop = (CONFIGS / "sft/tiny_shop.yaml").read_text()
    file = tmp_path / "shop.yaml"
    file.write_text(re.sub(r"^data: .*$", f"data: {data}", shop, flags=re.MULTILINE))
    with pytest.raises(ConfigError, match=r"data\.validation_path: held\.jsonl belongs to"):
        load_config(file, SftConfig, [change])
    for value, expected in (("null", None), ("new_held.jsonl", "new_held.jsonl")):
        key = "data.sources.data.validation_path"
        loaded = load_config(file, SftConfig, [change, f"{key}={value}"]).data
        assert loaded is not None
        (source,) = loaded.sources.values()
        assert (source.path, source.validation_path) == ("new.jsonl", expected)


@pytest.mark.parametrize("data", [SHORT_DATA, LONG_DATA])
@pytest.mark.parametrize(
    "change",
    [
        "data.sources.data={path: new.jsonl}",
        "data.sources={data: {path: new.jsonl}}",
        "data={path: new.jsonl}",
        "data={sources: {data: {path: new.jsonl}}}",
    ],
)
def test_mapping_of_a_source_replaces_it(change: str, data: str, tmp_path: Path) -> None:
    shop = (CONFIGS / "sft/tiny_shop.yaml").read_text()
    file = tmp_path / "shop.yaml"
    file.write_text(re.sub(r"^data: .*$", f"data: {data}", shop, flags=re.MULTILINE))
    loaded = load_config(file, SftConfig, [change]).data
    assert loaded is not None
    (source,) = loaded.sources.values()
    assert (source.path, source.validation_path) == ("new.jsonl", None)


def test_source_of_tasks_keeps_its_files_together(tmp_path: Path) -> None:
    text = (CONFIGS / "rl/tiny_retool.yaml").read_text()
    mine = "{environment: gsm8k, train_path: a.jsonl, held_out_path: b.jsonl}"
    text = re.sub(r"^tasks: .*$", f"tasks: {{sources: {{mine: {mine}}}}}", text, flags=re.MULTILINE)
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"tasks\.sources\.mine\.held_out_path: b\.jsonl belongs"):
        load_config(file, RlConfig, ["tasks.sources.mine.train_path=c.jsonl"])
    with pytest.raises(ConfigError, match="train_path needs held_out_path"):
        change = "tasks.sources.mine={environment: gsm8k, train_path: c.jsonl}"
        load_config(file, RlConfig, [change])
    replaced = load_config(file, RlConfig, ["tasks={sources: {retool: {environment: retool}}}"])
    assert list(replaced.tasks.sources) == ["retool"]
    heavier = load_config(file, RlConfig, ["tasks.sources.mine.weight=2"]).tasks.sources["mine"]
    assert (heavier.train_path, heavier.held_out_path, heavier.weight) == ("a.jsonl", "b.jsonl", 2)


def test_memory_plan_knows_what_is_frozen() -> None:
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, ["ablation.freeze=[experts]"])
    assert config.memory_inputs.frozen == ("experts",)


@pytest.mark.parametrize(
    ("rollout", "workers"),
    [
        ({"engine": {"type": "sglang"}}, 1),
        ({"engine": {"type": "sglang"}, "tasks_per_step": 32}, 4),
        ({"engine": {"type": "sglang"}, "tasks_per_step": 33}, 5),
        ({"engine": {"type": "sglang"}, "tasks_per_step": 32, "workers": 3}, 3),
        ({"tasks_per_step": 32}, 1),
        ({"tasks_per_step": 32, "workers": 2}, 2),
    ],
)
def test_rollout_workers_follow_the_episodes_of_a_step(
    rollout: dict[str, Any], workers: int
) -> None:
    assert RolloutConfig.model_validate(rollout).worker_count == workers
