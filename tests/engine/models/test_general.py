"""The general tier: transformers decoders through the attention interface, each against its own plain
forward.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.benchmark.roofline import weight_bytes
from engine.config import EngineConfig, Quantization
from engine.kernels import Workspace
from engine.kernels.cpu import Panels, open_library
from engine.models import Checkpoint, compiled, general, load_model
from engine.models.compiled import Mapped
from engine.models.cpu_modules import Experts, Norm, find_experts
from engine.models.fp8 import Fp8
from engine.models.general import GeneralDecoder
from engine.models.linear import Blocked, Int8, Plain, make_linear
from engine.models.trial_run import Trial
from engine.types import LoadError
from tests.engine.core.test_greedy import prompts
from tests.support.adapters import RECIPES, make_adapter
from tests.support.checkpoints import SMALL, oracle, oracle_greedy, oracle_logits
from tests.support.driver import Driver, greedy
from tests.support.kernels import need_kernels

Find = Callable[[str], Path]
COUNT = 10
FAMILIES = ["gemma2", "olmo2", "phi3", "gpt_neox", "cohere2", "gpt_oss", "stablelm", "nemotron"]
# whose attention the CPU's own kernels compute, with a softcap, sinks, and experts
BY_KERNELS = ["gemma2-32", "gpt_oss-32", "qwen3_moe-32"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, *BY_KERNELS])
def test_a_mixed_batch_equals_the_oracle(checkpoint: Find, name: str, kernels: bool) -> None:
    if kernels:
        need_kernels()
    folder = checkpoint(name)
    driver = Driver(folder, max_num_batched_tokens=48, num_blocks=100, cpu_kernels=kernels)
    model = driver.loop.runner.model
    assert isinstance(model, GeneralDecoder)
    assert (driver.loop.runner.cpu_attention is not None) == (kernels and name in BY_KERNELS)
    assert model.has_experts_in_panels == (kernels and ("gpt_oss" in name or "moe" in name))
    handles = [driver.submit(prompt, greedy(COUNT)) for prompt in prompts()]
    driver.run()
    expected = [oracle_greedy(folder, prompt, COUNT) for prompt in prompts()]
    assert [driver.tokens(handle) for handle in handles] == expected
    # and behind cached prefixes
    longer = [(*prompt, 1, 2, 3) for prompt in prompts()[-2:]]
    for prompt in longer:
        assert driver.generate(prompt, greedy(COUNT)) == oracle_greedy(folder, prompt, COUNT)
    assert driver.loop.scheduler.counters.prefix_hits > 100


@pytest.mark.parametrize(("name", "windows"), [("phimoe", [20]), ("qwen2_moe", [None, 20])])
def test_a_window_in_the_mask_alone_is_kept_to(
    checkpoint: Find, name: str, windows: list[int | None]
) -> None:
    driver = Driver(checkpoint(name), max_num_batched_tokens=48, num_blocks=100)
    model: Any = driver.loop.runner.model
    assert [group.window for group in model.spec.groups] == windows
    assert model._model.config.sliding_window == 20  # as before the trial
    prompt = max(prompts(), key=len)
    assert len(prompt) > 40
    assert driver.generate(prompt, greedy(COUNT)) == oracle_greedy(checkpoint(name), prompt, COUNT)


def test_a_window_that_hides_nothing_is_none(tmp_path: Path) -> None:
    """Of the configuration alone, without a use in the model; or as long as the context."""
    for model_type, window in (("olmo2", 20), ("phimoe", 512)):
        folder = build(tmp_path / model_type, model_type, sliding_window=window)
        assert [group.window for group in loaded(folder, dtype="float32").spec.groups] == [None]


def test_another_window_in_the_mask_than_in_the_attention_is_refused(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    monkeypatch.setattr(
        modeling_gemma2, "create_sliding_window_causal_mask", modeling_gemma2.create_causal_mask
    )
    with pytest.raises(LoadError, match="mix tokens"):
        loaded(checkpoint("gemma2"), dtype="float32")


def build(folder: Path, model_type: str, **fields: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type 'conv'"),
        (
            "llama4_text",
            {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
            "chunked_attention",
        ),
        ("bloom", {}, "layer 0 does not attend through the attention interface"),
        ("falcon", {"alibi": True}, "attention implementations of its own"),
        ("mamba", {}, "linear_attention"),
    ],
)
def test_architectures_that_need_what_is_not_here_are_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], match: str
) -> None:
    folder = build(tmp_path, model_type, **fields)
    with pytest.raises(LoadError, match=match) as caught:
        load_model(EngineConfig(folder, dtype="float32"), torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_the_trial_finds_tokens_mixed_behind_the_attention(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that lets one token see the one before it, past the attention, would mix requests."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    plain = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(LoadError, match="mix tokens"):
        load_model(EngineConfig(checkpoint("olmo2"), dtype="float32"), torch.device("cpu"))


def test_weights_that_are_not_finite_are_refused(checkpoint: Find, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("olmo2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.weight has weights that are not finite"):
        load_model(EngineConfig(tmp_path), torch.device("cpu"))


def test_weights_that_are_not_there_are_refused(checkpoint: Find, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    shutil.copytree(checkpoint("olmo2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(EngineConfig(tmp_path), torch.device("cpu"))


def test_bytes_that_nothing_says_how_to_read_are_refused(checkpoint: Find, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("olmo2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {name: tensor.to(torch.uint8) for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match="stores its weights as U8, which this engine does not read"):
        _ = Checkpoint(tmp_path).dtype


def test_a_file_that_is_overwritten_under_it_does_not_reach_a_loaded_model(
    checkpoint: Find, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("olmo2"), tmp_path, dirs_exist_ok=True)
    model = loaded(tmp_path)
    with torch.inference_mode():
        before = general._run(model._model, Trial())
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
        torch.testing.assert_close(general._run(model._model, Trial()), before, rtol=0, atol=0)


def logits_of(folder: Path, ids: list[int], max_model_len: int | None) -> torch.Tensor:
    """Logits of each of these tokens, by a model that is loaded for this context."""
    model = load_model(EngineConfig(folder, max_model_len=max_model_len), torch.device("cpu"))
    at = torch.arange(len(ids))
    with torch.inference_mode():
        return model.forward(torch.tensor(ids), at, Trial([len(ids)]), at)


def test_longrope_rotates_by_the_factors_of_the_context_that_is_served(checkpoint: Find) -> None:
    longrope = checkpoint("llama-longrope")
    short, long = ([(7 * i + j) % 300 for i in range(length)] for j, length in ((1, 30), (2, 40)))
    for max_model_len in (None, 32):
        torch.testing.assert_close(
            logits_of(longrope, short, max_model_len), oracle_logits(longrope, tuple(short))
        )
    torch.testing.assert_close(logits_of(longrope, long, 33), oracle_logits(longrope, tuple(long)))
    # what is in the cache when a sequence grows is what the longer one needs
    torch.testing.assert_close(logits_of(longrope, long[:30], 512), oracle_logits(longrope, tuple(long))[:30])


def test_what_longrope_leaves_of_the_context_is_told(checkpoint: Find) -> None:
    found = {}
    for max_model_len in (None, 16, 32, 33, 512):
        config = EngineConfig(checkpoint("llama-longrope"), max_model_len=max_model_len)
        spec = load_model(config, torch.device("cpu")).spec
        found[max_model_len] = spec.max_positions, spec.arithmetic
        assert spec.shortened.startswith("the context is 32 tokens instead of the 512") is (
            spec.max_positions == 32
        )
    assert found[None] == found[16] == found[32] and found[33] == found[512]
    assert found[None][0] == 32 and found[512][0] == 512
    assert found[None][1] != found[512][1], "saved keys are not read where the factors are others"


# ------------------------------------------------------------------------------------------------------------
# Layouts


def loaded(folder: Path, **given: Any) -> GeneralDecoder:
    """By torch alone, unless the kernels for a CPU are asked for."""
    given.setdefault("cpu_kernels", False)
    with torch.inference_mode():
        model = load_model(EngineConfig(folder, **given), torch.device("cpu"))
    assert isinstance(model, GeneralDecoder)
    return model


def maps(model: GeneralDecoder) -> dict[str, Mapped]:
    """The linear maps that have layouts of ours, by path."""
    return {path: each for path, each in model._model.named_modules() if isinstance(each, Mapped)}


def test_linear_maps_lie_as_in_a_native_model(checkpoint: Find) -> None:
    found = maps(loaded(checkpoint("olmo2")))
    assert len(found) == 3 * 7 + 1  # of a layer: q, k, v, o, gate, up, down; and the head
    assert all(isinstance(each.linear, Blocked) for each in found.values())
    # nothing is held twice: a step reads as much as without layouts
    stored = sum(tensor.numel() for tensor in oracle(checkpoint("olmo2")).parameters())
    table = 300 * 48
    assert weight_bytes(loaded(checkpoint("olmo2"))) == pytest.approx(4 * (stored - table), rel=0.01)


def test_weights_are_not_held_twice_while_they_are_laid_out(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []

    def noting(*given: Any) -> Any:
        stored.append(sum(type(each) is torch.nn.Linear for each in gc.get_objects()))
        return make_linear(*given)

    monkeypatch.setattr(general, "make_linear", noting)
    loaded(checkpoint("olmo2"))
    assert stored == list(range(stored[0], stored[0] - len(stored), -1))


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Int8), ("fp8", Fp8)])
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_its_weights_may_have_fewer_bits(
    checkpoint: Find, name: str, quantization: Quantization, kind: type
) -> None:
    plain, few = loaded(checkpoint(name)), loaded(checkpoint(name), quantization=quantization)
    own = maps(few)
    head = few._model.get_output_embeddings()
    assert all(isinstance(each.linear, kind) for each in own.values() if each is not head)
    # A head that keeps its bits is repacked exactly where the processor has a use for that.
    config = few._model.config
    weight = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    repacked = make_linear(weight, None, "int8" if quantization == "int8" else "none", Workspace())
    assert isinstance(head, Mapped) is not isinstance(repacked, Plain) and not isinstance(repacked, Fp8)
    assert not isinstance(head, Mapped) or type(head.linear) is type(repacked)
    assert few.spec.dtype is torch.bfloat16
    assert few.spec.fingerprint != plain.spec.fingerprint
    assert weight_bytes(few) < 0.6 * weight_bytes(plain)
    with torch.inference_mode():
        logits = [general._run(each._model, Trial()).float() for each in (plain, few)]
    assert (logits[1] - logits[0]).norm() < 0.2 * logits[0].norm()


@pytest.mark.parametrize("name", ["gemma2-32", "gpt_oss-32", "qwen3_moe-32"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_weights_have_fewer_bits_in_the_kernels_layout_too(
    checkpoint: Find, name: str, quantization: Quantization
) -> None:
    need_kernels()
    plain = loaded(checkpoint(name), dtype="bfloat16", cpu_kernels=True)
    few = loaded(checkpoint(name), quantization=quantization, cpu_kernels=True)
    assert all(isinstance(each.linear, Panels) for model in (plain, few) for each in maps(model).values())
    assert weight_bytes(few) < 0.7 * weight_bytes(plain)  # narrow maps are not whole panels
    assert plain.has_experts_in_panels == few.has_experts_in_panels == (name != "gemma2-32")
    with torch.inference_mode():
        logits = [general._run(each._model, Trial()).float() for each in (plain, few)]
    if not few.has_experts_in_panels:  # whose choices of experts with random weights are as good as others
        assert (logits[1] - logits[0]).norm() < (0.4 if quantization == "int4" else 0.1) * logits[0].norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2-32", "qwen3_moe-32", "olmo2"])
def test_norms_are_the_kernels_where_they_are_seen_to_be_the_same(
    checkpoint: Find, name: str, dtype: str
) -> None:
    need_kernels()
    plain, replaced = (
        loaded(checkpoint(name), dtype=dtype, cpu_kernels=kernels) for kernels in (False, True)
    )
    kinds = {type(each).__name__ for each in replaced._model.modules()}
    assert "Norm" in kinds and not any(kind.endswith("RMSNorm") for kind in kinds)
    x = torch.randn(3, 70, 48).to(plain.spec.dtype)
    with torch.inference_mode():
        found, expected = (each._model.model.norm(x) for each in (replaced, plain))
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=1e-6)


def test_a_norm_that_does_something_else_is_left(checkpoint: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    need_kernels()
    plain = Olmo2RMSNorm.forward
    monkeypatch.setattr(Olmo2RMSNorm, "forward", lambda self, x: plain(self, x) * 1.1)
    model = loaded(checkpoint("olmo2"), cpu_kernels=True)
    assert not any(isinstance(each, Norm) for each in model._model.modules())


def test_what_chooses_among_experts_is_never_rounded(checkpoint: Find) -> None:
    folder = checkpoint("gpt_oss")
    assert not any(path.rpartition(".")[2] in general.CHOOSERS for path in maps(loaded(folder)))


class Mixture(torch.nn.Module):
    """What transformers' decorator for experts leaves of a module, with experts without a gate."""

    has_gate, has_bias, has_post_expert_norm, is_transposed = False, True, True, False

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("up_proj", (5, 96, 64)), ("down_proj", (5, 64, 96))):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(*shape)))
            self.register_parameter(f"{name}_bias", torch.nn.Parameter(torch.randn(*shape[:2])))
        self.act_fn = torch.nn.GELU()
        self.post_expert_norm = torch.nn.RMSNorm(64)


@pytest.mark.parametrize(("quantization", "most"), [("none", 1e-5), ("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("num_tokens", [1, 2, 130])
def test_experts_without_a_gate_and_choices_of_none(
    num_tokens: int, quantization: Quantization, most: float
) -> None:
    """A number beyond the last expert is a choice that a router has masked."""
    need_kernels()
    library = open_library()
    assert library is not None
    torch.manual_seed(0)
    dtype = torch.float32 if quantization == "none" else torch.bfloat16
    module: Any = Mixture().to(dtype)
    x, weights = torch.randn(num_tokens, 64, dtype=dtype), torch.rand(num_tokens, 3, dtype=dtype)
    chosen = torch.stack([torch.randperm(6)[:3] for _ in range(num_tokens)])
    expected = torch.zeros(num_tokens, 64)
    with torch.inference_mode():
        for t in range(num_tokens):
            for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
                if expert < 5:
                    middle = module.act_fn(module.up_proj[expert] @ x[t] + module.up_proj_bias[expert])
                    out = module.down_proj[expert] @ middle + module.down_proj_bias[expert]
                    expected[t] += weight * module.post_expert_norm(out)
        assert list(find_experts(module)) == [module]
        found = Experts(module, library, quantization)(x, chosen, weights)
    assert (found - expected).norm() < most * expected.norm()
    assert module.up_proj.shape == (5, 96, 64) and module.up_proj.isnan().all()


def test_a_model_that_looks_at_its_modules_weights_keeps_them(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    def by_itself(self: Any, x: Any) -> Any:
        middle = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return middle @ self.down_proj.weight.T

    monkeypatch.setattr(Olmo2MLP, "forward", by_itself)
    caplog.set_level("INFO", "antiphon.engine")
    assert not maps(loaded(checkpoint("olmo2")))
    assert "Olmo2ForCausalLM keeps its weights as they are stored" in caplog.text
    with pytest.raises(LoadError, match="Olmo2ForCausalLM is not served with quantization fp8") as caught:
        loaded(checkpoint("olmo2"), quantization="fp8")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilers that write code take a minute; what they are given is what is tried here."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma2", {"kv_cache_dtype": "fp8"}),
        ("olmo2", {"quantization": "int8"}),
        ("qwen3_moe-32", {}),
    ],
)
def test_compiled_it_says_the_same(checkpoint: Find, name: str, settings: dict[str, Any]) -> None:
    def run(compile: bool) -> list[tuple[int, ...]]:
        driver = Driver(
            checkpoint(name), max_num_batched_tokens=48, num_blocks=100, compile=compile, **settings
        )
        model = driver.loop.runner.model
        assert isinstance(model, GeneralDecoder) and (model._compiled is not None) == compile
        handles = [driver.submit(prompt, greedy(COUNT, prompt_logprobs=0)) for prompt in prompts()]
        driver.run()
        return [driver.tokens(handle) for handle in handles]

    expected = run(False)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert run(True) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 2


def test_with_adapters_nothing_is_compiled_for_nothing(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(general, "Compiled", None)
    make_adapter(RECIPES["sums"], checkpoint("olmo2"), tmp_path)
    model = loaded(checkpoint("olmo2"), compile=True, lora={"own": tmp_path / "adapter"})
    assert model._compiled is None and model.adapters is not None
    assert "Olmo2ForCausalLM has adapters, so it is not compiled" in caplog.text


@pytest.mark.long
def test_what_cannot_be_compiled_runs_as_it_is(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    folder = checkpoint("olmo2")
    driver = Driver(folder, num_blocks=100, compile=True)
    assert "Olmo2ForCausalLM is not compiled, and runs as it is" in caplog.text
    assert "no compiler here" in caplog.text
    prompt = prompts()[1]
    assert driver.generate(prompt, greedy(COUNT)) == oracle_greedy(folder, prompt, COUNT)
    torch._dynamo.reset()


def test_what_computes_otherwise_compiled_runs_as_it_is(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *given: tuple(own * 1.1 for own in graph(*given))

    monkeypatch.setattr(compiled, "BACKEND", wrong)
    assert loaded(checkpoint("olmo2"), compile=True)._compiled is None
    assert "compiled, its logits differ by" in caplog.text
    torch._dynamo.reset()
