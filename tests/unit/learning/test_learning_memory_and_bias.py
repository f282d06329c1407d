"""What can be told about a run before it starts: memory, and what makes its gradient biased."""

import subprocess
import sys

import pytest

from staleflow.config import load
from staleflow.learning import memory
from staleflow.learning.sampling import bias_warnings, warnings_of
from staleflow.learning.settings import AlgorithmSettings


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen2.5-0.5B", 0.494), ("Qwen2.5-1.5B", 1.54), ("Qwen2.5-Math-7B", 7.62), ("Qwen2.5-14B", 14.77),
     ("Qwen2.5-32B", 32.76), ("Qwen3-30B-A3B", 30.53)],
)  # fmt: skip
def test_known_models_have_their_published_size(name, billions):
    assert memory.KNOWN_SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_the_shape_on_disk_counts_the_model_on_disk(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    counted = sum(p.numel() for n, p in model.named_parameters() if not n.endswith("bias"))
    assert memory.model_shape(tiny_model).parameters == counted


def test_trainer_state_is_sixteen_bytes_a_parameter_over_the_ranks():
    shape = memory.KNOWN_SHAPES["Qwen2.5-Math-7B"]
    need = memory.trainer_memory(shape, ranks=32, microbatch_tokens=22528, activation_checkpointing=True)
    assert need.state_bytes == pytest.approx(16 * 7.62e9 / 32, rel=1e-2)
    assert need.total_bytes < 60 * memory.GIB
    offloaded = memory.trainer_memory(shape, ranks=32, microbatch_tokens=22528, cpu_offload=True)
    assert offloaded.state_bytes == 0
    assert offloaded.offloaded_bytes == need.state_bytes


def test_checkpointing_and_chunks_save_what_they_are_for():
    shape = memory.KNOWN_SHAPES["Qwen2.5-14B"]
    plain = memory.trainer_memory(shape, ranks=8, microbatch_tokens=8192)
    assert (
        memory.trainer_memory(shape, ranks=8, microbatch_tokens=8192, activation_checkpointing=True).activation_bytes
        < 0.2 * plain.activation_bytes
    )
    assert plain.logits_bytes == 3 * 4 * 4096 * 152064


def test_an_unknown_model_is_no_shape(tmp_path):
    assert memory.model_shape(tmp_path / "nobody-knows") is None


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ({}, {"top_p": 0.9}, "rollout.top_p = 0.9"),
        ({}, {"top_k": 50}, "rollout.top_k = 50"),
        ({}, {"stop": ("\n",)}, "ending is never trained"),
        ({"engine_correction": "truncate"}, {}, "without effect while algorithm.proximal = 'engine'"),
        ({"proximal": "recompute", "updates_per_step": 2}, {}, "age_correction = 'none' with staleness.eta = 2"),
        ({"proximal": "recompute", "age_correction": "mask"}, {}, "algorithm.updates_per_step = 1"),
        ({"proximal": "interpolate", "age_correction": "mask"},
         {"engine_dtype": "bfloat16", "trainer_dtype": "float32"},
         "set algorithm.engine_correction = 'truncate'"),
        ({"loss": "gspo"}, {}, "GSPO's objective is the mean over sequences"),
    ],
)  # fmt: skip
def test_what_biases_is_named_with_its_remedy(algorithm, options, said):
    (warning,) = bias_warnings(AlgorithmSettings(**algorithm), eta=2, **options)
    assert said in warning


def test_the_demo_and_synchronous_training_are_unbiased():
    assert bias_warnings(AlgorithmSettings(), eta=2) == []
    assert bias_warnings(AlgorithmSettings(proximal="recompute"), eta=0) == []


def test_rounding_on_the_way_to_the_engine_counts():
    decoupled = ["algorithm.proximal=recompute", "algorithm.age_correction=mask", "algorithm.updates_per_step=2"]
    assert warnings_of(load("configs/demo.toml", decoupled)) == []
    (warning,) = warnings_of(load("configs/demo.toml", [*decoupled, "parameters.wire_dtype=bfloat16"]))
    assert "engine in bfloat16, trainer in float32" in warning


def test_a_plan_tells_both_without_torch():
    program = (
        "import sys; from staleflow.cli import main;"
        "main(['plan', 'configs/reference/starter_2gpu.toml', 'rollout.top_p=0.9', 'algorithm.age_correction=none']);"
        "sys.exit({'torch', 'transformers', 'vllm'} & set(sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert len(told) == 2 and "top_p" in told[0] and "age_correction" in told[1]
    assert "0.49 billion parameters" in done.stdout
