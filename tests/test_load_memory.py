"""Peak memory of loading a draft, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import draft_config, verifier_config, verifier_tensors, write

MEASURE = """
import json, sys, torch
torch.set_num_threads(1)
import specbench as sb
small_verifier, small_draft, verifier, draft = sys.argv[1:]

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

sb.load_draft(sb.open_pair(small_verifier, small_draft), device="cpu")  # imports and one-time buffers are not the draft's
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
before, peak_before = status("VmRSS"), status("VmHWM")
loaded = sb.load_draft(sb.open_pair(verifier, draft), device="cpu")
print(json.dumps({"extra": status("VmHWM") - before, "slack": peak_before - before, "held": status("VmRSS") - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("widest", ["embed_tokens", "mlp"])
def test_loading_takes_little_more_memory_than_the_file(tiny, tmp_path, widest):
    """About 200 MB, once mostly one tensor: no whole second copy exists at any time, of the file or of a tensor."""
    vocab, inner = (400_000, 256) if widest == "embed_tokens" else (256, 150_000)
    layer = draft_config()["transformer_layer_config"] | {"intermediate_size": inner, "vocab_size": vocab}
    hidden = 256
    layer |= {"hidden_size": hidden, "num_attention_heads": 16, "num_key_value_heads": 4}

    def matrix(*shape):
        return torch.ones(shape, dtype=torch.bfloat16)

    p = "layers.0."
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden), "lm_head.weight": matrix(64, hidden), "norm.weight": matrix(hidden),
        "d2t": torch.arange(64) * 3,
        f"{p}self_attn.q_proj.weight": matrix(256, 2 * hidden), f"{p}self_attn.k_proj.weight": matrix(64, 2 * hidden),
        f"{p}self_attn.v_proj.weight": matrix(64, 2 * hidden), f"{p}self_attn.o_proj.weight": matrix(hidden, 256),
        f"{p}mlp.gate_proj.weight": matrix(inner, hidden), f"{p}mlp.up_proj.weight": matrix(inner, hidden),
        f"{p}mlp.down_proj.weight": matrix(hidden, inner), "embed_tokens.weight": matrix(vocab, hidden),
        **{f"{p}{name}.weight": matrix(hidden) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    draft = write(tmp_path / "draft", draft_config(transformer_layer_config=layer, target_hidden_size=hidden), tensors)
    size = (draft / "model.safetensors").stat().st_size
    config = verifier_config(hidden_size=hidden, vocab_size=vocab, num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16")
    small = verifier_tensors(config | {"vocab_size": 1}, dtype=torch.bfloat16)  # its weights are never read here
    verifier = write(tmp_path / "verifier", config, small)
    del tensors, small
    folders = (tiny["verifier"], tiny["draft"], verifier, draft)
    command = [sys.executable, "-c", MEASURE, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 195e6 < size < 260e6
    assert found["held"] > 0.9 * size, "the draft must really be in memory for its peak to mean anything"
    assert found["slack"] < 0.05 * size, "the peak was not reset, so it says nothing"
    assert found["extra"] < 1.5 * size, f"{found['extra'] / size:.2f} times the file"
    print(f"{widest}: peak {found['extra'] / size:.3f}, held {found['held'] / size:.3f} times the file of {size / 1e6:.0f} MB")
