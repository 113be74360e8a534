"""The native verifier beside transformers on the same folder, and against itself: incremental, batched, rejected rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import tiny_verifier, tiny_w4a16_verifier
from transformers import AutoModelForCausalLM

from specbench.errors import CheckpointError, ConfigError
from specbench.load import load_draft
from specbench.models.blocks import rotary_table
from specbench.pair import Pair, open_checkpoint, open_pair
from specbench.verifier import NEEDED, load_verifier

N_LAYERS = 8
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"head_dim": 32},
    "llama-no-groups": {"num_key_value_heads": 4},
    "llama-theta": {"rope_theta": 500000.0},
    "llama-rope-parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "llama-3-scaling": {"rope_scaling": LLAMA3, "rope_theta": 1000.0},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral-window-as-wide-as-the-context": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 512},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 16},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3-biases": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": True},
}


def load(folder, **options):
    checkpoint = open_checkpoint(folder)
    return load_verifier(Pair(checkpoint, checkpoint), device="cpu", **options)


def ids(*shape, seed=3):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def run(model, tokens, cache, start=0, aux=(), **step):
    """Logits [B, n, vocab] and auxiliary states of tokens that begin at slot `start` in every row."""
    positions = torch.arange(start, start + tokens.shape[1]).expand(len(tokens), -1)
    hidden, states = model(tokens, model.step(positions, start + tokens.shape[1], **step), cache, aux)
    return model.lm_head(hidden), states


def close(ours, theirs, bound=1e-4):
    """Largest error as a share of the reference's range."""
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min())) < bound


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(native, transformers) of one folder."""
    changes = {**CONFIGS[request.param], "layers": N_LAYERS}
    folder = tiny_verifier(tmp_path_factory.mktemp("decoder") / request.param, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return load(folder), theirs


@pytest.fixture(scope="module")
def model(tiny):
    return load(tiny["verifier"])


@torch.inference_mode()
def test_logits_equal_transformers(pair):
    native, theirs = pair
    tokens = ids(2, 100)
    logits, _ = run(native, tokens, native.new_cache(100, 2))
    assert logits.dtype == torch.float32
    assert close(logits, theirs(tokens).logits)


@torch.inference_mode()
def test_auxiliary_states_equal_transformers(pair):
    """Ids 2, n // 2, n - 3 enter those layers; n leaves the last one (transformers shows it only to a hook); n + 1 is the normed state."""
    native, theirs = pair
    tokens, last = ids(1, 40), {}
    hook = theirs.model.layers[-1].register_forward_hook(lambda module, args, output: last.update(state=output))
    states = theirs(tokens, output_hidden_states=True).hidden_states
    hook.remove()
    n = N_LAYERS
    wanted = (2, n // 2, n - 3, n, n + 1)
    reference = [states[2], states[n // 2], states[n - 3], last["state"], states[n]]
    _, aux = run(native, tokens, native.new_cache(40), aux=wanted)
    assert aux.shape == (1, 40, len(wanted) * 64)
    for name, ours, expected in zip(wanted, aux.chunk(len(wanted), -1), reference, strict=True):
        assert close(ours, expected), name
    embedded = run(native, tokens, native.new_cache(40), aux=(0,))[1]
    assert torch.equal(embedded, theirs.model.embed_tokens(tokens))


@torch.inference_mode()
def test_prefill_then_steps_equal_one_pass(pair):
    native, _ = pair
    tokens, cache = ids(1, 32), native.new_cache(32)
    whole, aux = run(native, tokens, native.new_cache(32), aux=(2, 4, 5))
    pieces = [run(native, tokens[:, :20], cache, aux=(2, 4, 5))]
    pieces += [run(native, tokens[:, 20:25], cache, 20, aux=(2, 4, 5))]
    pieces += [run(native, tokens[:, i : i + 1], cache, i, aux=(2, 4, 5), masked=False) for i in range(25, 32)]
    assert close(torch.cat([logits for logits, _ in pieces], 1), whole)
    assert close(torch.cat([states for _, states in pieces], 1), aux)


@torch.inference_mode()
def test_batches_equal_single_rows(pair):
    native, _ = pair
    tokens, cache = ids(3, 24), native.new_cache(24, 3)
    batched, _ = run(native, tokens, cache)
    step, _ = run(native, tokens[:, :1], cache, 12)
    for row in range(3):
        alone = native.new_cache(24)
        assert close(batched[row : row + 1], run(native, tokens[row : row + 1], alone)[0])
        assert close(step[row : row + 1], run(native, tokens[row : row + 1, :1], alone, 12)[0])


@torch.inference_mode()
def test_ragged_rows_equal_single_rows(model):
    """Every row has its own length; padding is written beyond it, and overwritten before anyone sees it."""
    lengths, steps = [5, 17, 1], 4
    tokens, more, cache = ids(3, 17), ids(3, steps, seed=4), model.new_cache(32, 3)
    run(model, tokens, cache)
    logits = []
    for i in range(steps):
        positions = torch.tensor(lengths)[:, None] + i
        hidden, _ = model(more[:, i : i + 1], model.step(positions, max(lengths) + i + 1), cache)
        logits.append(model.lm_head(hidden))
    for row, length in enumerate(lengths):
        alone = torch.cat((tokens[row, :length], more[row]))[None]
        expected, _ = run(model, alone, model.new_cache(32))
        assert close(torch.cat([step[row] for step in logits]), expected[0, length:])


@torch.inference_mode()
def test_neighbouring_rows_of_a_cache_can_run_alone(model):
    tokens, more, cache = ids(4, 9), ids(2, 3, seed=4), model.new_cache(16, 4)
    run(model, tokens, cache)
    before = [layer.kv.clone() for layer in cache.layers]
    got, _ = run(model, more, cache, 9, row=1)
    for i, row in enumerate((1, 2)):
        expected, _ = run(model, torch.cat((tokens[row], more[i]))[None], model.new_cache(16))
        assert close(got[i], expected[0, 9:])
    for old, layer in zip(before, cache.layers, strict=True):
        assert torch.equal(layer.kv[[0, 3]], old[[0, 3]])


@torch.inference_mode()
def test_a_causal_prompt_pass_equals_a_masked_one(pair):
    native, _ = pair
    tokens = ids(3, 40)
    causal, masked = native.new_cache(40, 3), native.new_cache(40, 3)
    assert close(run(native, tokens, causal, causal=True)[0], run(native, tokens, masked)[0])
    for ours, theirs in zip(causal.layers, masked.layers, strict=True):
        assert torch.allclose(ours.kv, theirs.kv, atol=1e-4)


@torch.inference_mode()
def test_a_rejected_row_leaves_nothing_behind(model):
    tokens, wrong, right = ids(1, 10), ids(1, 5, seed=4), ids(1, 3, seed=5)
    cache = model.new_cache(16)
    run(model, tokens, cache)
    run(model, wrong, cache, 10)  # slots 10 .. 14
    after, _ = run(model, right, cache, 10)
    clean = model.new_cache(16)
    run(model, tokens, clean)
    assert torch.equal(after, run(model, right, clean, 10)[0])


@torch.inference_mode()
def test_positions_past_the_trained_length_have_a_rotary_table(tmp_path):
    native = load(tiny_verifier(tmp_path / "v", max_position_embeddings=16))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32).eval()
    tokens, cache = ids(1, 40), native.new_cache(40)
    run(native, tokens[:, :8], cache)
    late, _ = run(native, tokens[:, 8:], cache, 8)
    assert close(late, theirs(tokens).logits[:, 8:])


def test_a_rotary_table_grows_in_strides(tiny, tmp_path, monkeypatch):
    pair = open_pair(tiny_verifier(tmp_path / "v", max_position_embeddings=8), tiny["draft"])
    short = load_draft(pair, device="cpu")
    short.config = replace(short.config, max_position_embeddings=8)
    for module in (load_verifier(pair, device="cpu"), short):
        made = []
        monkeypatch.setattr("specbench.models.blocks.rotary_table", lambda *args, made=made: made.append(args) or rotary_table(*args))
        for i in range(200):
            module.step(torch.tensor([[i]]), i + 1)
        assert len(made) < 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@torch.inference_mode()
def test_dtype_is_the_configs_unless_asked(tmp_path, dtype):
    folder = tiny_verifier(tmp_path / "v", dtype=dtype)
    tokens = ids(1, 8)
    for options, expected in (({}, dtype), ({"dtype": "bfloat16"}, "bfloat16")):
        model = load(folder, **options)
        cache = model.new_cache(8)
        logits, _ = run(model, tokens, cache)
        assert {logits.dtype, model.dtype, cache.layers[0].kv.dtype} == {getattr(torch, expected)}
        assert bool(torch.isfinite(logits).all())


@torch.inference_mode()
def test_a_4_bit_verifier_equals_its_dequantized_twin(tmp_path):
    """The twin's plain file holds exactly the numbers that the packed file stands for, so fp32 differs by nothing."""
    packed = load(tiny_w4a16_verifier(tmp_path / "w4", group=32))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_verifier(tmp_path / "plain"), dtype=torch.float32).eval()
    tokens = ids(1, 20)
    for layer, twin in zip(packed.layers, theirs.model.layers, strict=True):
        w = layer.mlp.down_proj.kernel.weight
        assert 0 < float((w - twin.mlp.down_proj.weight).abs().max()) < float(w.abs().max()) / 7
        fused = layer.self_attn.qkv_proj.kernel.weight
        for name, rows in (("q_proj", slice(0, 64)), ("k_proj", slice(64, 96)), ("v_proj", slice(96, 128))):
            getattr(twin.self_attn, name).weight.data.copy_(fused[rows])
        twin.self_attn.o_proj.weight.data.copy_(layer.self_attn.o_proj.kernel.weight)
        gate, up = layer.mlp.gate_up_proj.kernel.weight.chunk(2)
        twin.mlp.gate_proj.weight.data.copy_(gate)
        twin.mlp.up_proj.weight.data.copy_(up)
        twin.mlp.down_proj.weight.data.copy_(w)
    assert close(run(packed, tokens, packed.new_cache(20))[0], theirs(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window is 64"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window is 4096"),  # the default of MistralConfig
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window is 64"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "float99"}, "dtype is 'float99'"),
        ({"rope_scaling": {"rope_type": "no-such-scaling"}}, "no-such-scaling"),
    ],
)
def test_a_model_that_is_not_computed_here_is_refused(tmp_path, changes, message):
    folder = tiny_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "changes", [{"model_type": "qwen2"}, {"model_type": "qwen3"}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 32}], ids=str
)
def test_a_config_that_the_tensors_contradict_is_refused(tmp_path, changes):
    folder = tiny_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match="no weight was read"):
        load(folder)


@pytest.mark.parametrize("key", NEEDED)
def test_a_size_that_the_config_lacks_is_named(tmp_path, key):
    folder = tiny_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=key):
        load(folder)
