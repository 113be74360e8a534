"""Files that mean harm, or that nobody wrote on purpose: the doctor always answers, with a finding, in little time and memory."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from doctored import draft, sharded_verifier
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import tiny_draft, tiny_verifier, w4a16_section

import specbench as sb
from specbench.checkpoint.files import HEADER_LIMIT, JSON_LIMIT
from specbench.doctor.findings import Report
from specbench.doctor.pages import pages

FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | st.sampled_from([0, 1, 2, 3, 8, 64, 128, 256, -1, 10**30, "1", "64", float("inf"), float("nan")]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A verifier, a flat draft, a draft in the speculators format; tests write over copies of their configs."""
    folder = tmp_path_factory.mktemp("hostile")
    return tiny_verifier(folder / "v"), draft(folder / "flat"), tiny_draft(folder / "nested")


def answered(report: Report) -> Report:
    assert all(finding.code in pages() and finding.sentence for finding in report)
    json.dumps(report.to_dict())
    assert str(report) and report._repr_html_()
    return report


def raw(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A draft's folder whose weights are these bytes."""
    draft(folder)
    content = struct.pack("<Q", len(header) if length is None else length) + header + data
    (folder / "model.safetensors").write_bytes(content)
    return folder


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def dumped(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


HEADERS: dict[str, tuple[bytes, bytes, int | None]] = {
    "no byte": (b"", b"", None),
    "of absurd length": (b"{}", b"", 2**63),
    "longer than the file": (b"{}", b"", 10**6),
    "no JSON": (b"{]", b"", None),
    "no UTF-8": (b'{"\xff\xfe": 1}', b"", None),
    "a list": (b"[1, 2]", b"", None),
    "nested without end": (b"[" * 200_000, b"", None),
    "duplicate keys": (b'{"a": %s, "a": %s}' % (json.dumps(entry(0, 8)).encode(), json.dumps(entry(0, 8)).encode()), bytes(8), None),
    "a key twice in an entry": (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8), None),
    "overlapping": (dumped(a=entry(0, 8), b=entry(4, 12)), bytes(12), None),
    "with a gap": (dumped(a=entry(0, 8), b=entry(12, 16)), bytes(16), None),
    "out of the file": (dumped(a=entry(0, 8), b=entry(8, 4000)), bytes(16), None),
    "backwards": (dumped(a=entry(8, 0)), bytes(8), None),
    "negative": (dumped(a=entry(-8, 0, shape=[2])), bytes(8), None),
    "an endless shape": (dumped(a=entry(0, 8, shape=[2**62, 2**62])), bytes(8), None),
    "a shape of texts": (dumped(a=entry(0, 8, shape=["2"])), bytes(8), None),  # type: ignore[list-item]
    "an unknown dtype": (dumped(a=entry(0, 8, "X" * 100_000)), bytes(8), None),
    "huge numbers": (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', bytes(8), None),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_a_finding(name: str, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    began = time.process_time()
    report = answered(sb.diagnose(clean[0], raw(tmp_path / "d", *HEADERS[name])))
    assert report.codes == ("damaged-file",) and report.exit_code() == 2
    assert len(report.findings[0].sentence) < 2000 and time.process_time() - began < 2


def test_a_header_above_the_limit_is_not_read(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = raw(tmp_path / "d", b"", b"", HEADER_LIMIT + 1)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(HEADER_LIMIT + 1000)  # a hole
    tracemalloc.start()
    report = answered(sb.diagnose(clean[0], folder))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.codes == ("damaged-file",) and str(HEADER_LIMIT) in report.findings[0].sentence
    assert peak < 20 << 20, peak


def test_a_header_just_below_the_limit_is_bounded(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = raw(tmp_path / "d", b'{"a": [' + b"1," * (HEADER_LIMIT // 2 - 100) + b"1]}")
    began = time.process_time()
    assert answered(sb.diagnose(clean[0], folder)).codes == ("damaged-file",)
    assert time.process_time() - began < 20


CONFIGS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "bad-json"),
    "nothing": (b"", "bad-json"),
    "a list": (b"[]", "bad-json"),
    "no UTF-8": (b'{"a": "\xff"}', "bad-json"),
    "nested without end": (b'{"a":' * 100_000, "bad-json"),
    "NaN sizes": (b'{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": NaN}', "config-value"),
    "an endless number": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "bad-json"),
    "architectures as text": (b'{"architectures": "LlamaForCausalLMEagle3"}', "config-value"),
    "quantization as text": (b'{"quantization_config": "awq"}', "config-value"),
}


@pytest.mark.parametrize("side", ["verifier", "draft"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_a_finding(name: str, side: str, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    content, code = CONFIGS[name]
    folder = (tiny_verifier if side == "verifier" else draft)(tmp_path / "x")
    (folder / "config.json").write_bytes(content)
    report = answered(sb.diagnose(folder, clean[1]) if side == "verifier" else sb.diagnose(clean[0], folder))
    assert code in report and report[code].severity == "error"
    assert report[code].evidence or side in report[code].sentence or "config.json" in report[code].sentence


def test_a_huge_config_is_not_read_whole(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(100 * JSON_LIMIT)  # a hole
    assert answered(sb.diagnose(clean[0], folder)).codes == ("bad-json",)


PATHS = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", "a\0b.safetensors", "./model.safetensors"]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
def test_paths_of_an_index_stay_in_the_folder(path: str, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = sharded_verifier(tmp_path / "v")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = path
    index.write_text(json.dumps(content))
    report = answered(sb.diagnose(folder, clean[1]))
    assert set(report.codes) <= {"index-outside", "missing-shard"} and len(report) == 1 and report.exit_code() == 2


def test_links_and_pipes_are_refused(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A loop of links, a link to a device, a pipe that nobody writes to: no read that blocks or never ends."""
    for number, make in enumerate((
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    )):  # fmt: skip
        for name in ("config.json", "model.safetensors"):
            folder = draft(tmp_path / f"{number}-{name}")
            (folder / name).unlink()
            make(folder / name)
            report = answered(sb.diagnose(clean[0], folder))
            assert report.exit_code() == 2 and report.codes[0] in ("bad-json", "no-weights", "damaged-file", "no-config"), str(report)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert answered(sb.diagnose(clean[0], loop)).exit_code() == 2


def test_a_link_to_a_real_file_is_a_file(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """As in a hub cache, whose snapshots are links to blobs."""
    folder = tmp_path / "linked"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(clean[1] / name)
    assert sb.diagnose(clean[0], folder).codes == sb.diagnose(clean[0], clean[1]).codes


def test_a_pickle_that_would_run_code_is_a_finding(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = draft(tmp_path / "d")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    assert answered(sb.diagnose(clean[0], folder)).codes == ("unsafe-pickle",)
    assert not (tmp_path / "ran").exists()


def test_control_characters_do_not_reach_a_terminal(clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", {"architectures": ["\x1b[31mLlamaForCausalLM\x07\n"], "draft_vocab_size": "\x1b[2J"})
    text = str(answered(sb.diagnose(clean[0], folder)))
    assert "\x1b" not in text and "\x07" not in text


# Fuzzed -----------------------------------------------------------------------------------------------------------------------------------

FLAT = (
    "architectures", "model_type", "draft_vocab_size", "torch_dtype", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings", "head_dim", "rope_theta",
    "rope_scaling", "rope_parameters", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_residual",
    "norm_output", "fc_norm", "norm_before_fc", "layer_types", "sliding_window", "use_sliding_window", "tie_word_embeddings",
    "quantization_config", "compression_config", "attention_bias", "mlp_bias", "eagle_fc_bias", "use_aux_hidden_state", "dflash_config",
    "speculators_config", "speculators_model_type", "target_model_type", "parallel_drafting", "transformer_layer_config", "text_config",
)  # fmt: skip
SECTIONS = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(["compressed-tensors", "awq", "gptq", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "mxfp4"])},
    optional={
        "bits": VALUES, "group_size": VALUES, "format": VALUES, "config_groups": VALUES, "ignore": VALUES, "quant_algo": VALUES,
        "weight_block_size": VALUES, "modules_to_not_convert": VALUES, "desc_act": VALUES, "transform_config": VALUES, "version": VALUES,
        "activation_scheme": VALUES, "exclude_modules": VALUES, "quantized_layers": VALUES, "kv_cache_scheme": VALUES, "dynamic": VALUES,
        "sparsity_config": VALUES, "ignored_layers": VALUES, "checkpoint_format": VALUES, "lm_head": VALUES,
    },
)  # fmt: skip


def with_config(folder: Path, target: Path, config: dict[str, Any]) -> Path:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    link = target / "model.safetensors"
    if not link.is_symlink():
        link.symlink_to(folder / "model.safetensors")
    return target


@FUZZ
@given(
    which=st.sampled_from([0, 1, 2]), changes=st.dictionaries(st.sampled_from(FLAT), VALUES, min_size=1, max_size=4), nested=st.booleans()
)  # fmt: skip
def test_fuzzed_configs(which: int, changes: dict[str, Any], nested: bool, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    config = json.loads((clean[which] / "config.json").read_text())
    inner = {0: "text_config", 1: "eagle_config", 2: "transformer_layer_config"}[which]
    if nested and isinstance(config.get(inner), dict):
        config[inner] |= changes
    else:
        config |= changes
    folder = with_config(clean[which], tmp_path / f"fuzz-{which}", config)
    answered(sb.diagnose(folder, clean[1]) if which == 0 else sb.diagnose(clean[0], folder))


@FUZZ
@given(section=SECTIONS, side=st.booleans())
@example(section=w4a16_section(ignore=["re:["]), side=True)
@example(
    section=w4a16_section(config_groups={"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": "32"}}}), side=True
)
def test_fuzzed_quantization_sections(section: dict[str, Any], side: bool, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    which = 0 if side else 1
    config = json.loads((clean[which] / "config.json").read_text()) | {"quantization_config": section}
    folder = with_config(clean[which], tmp_path / f"quant-{which}", config)
    answered(sb.diagnose(folder, clean[1]) if side else sb.diagnose(clean[0], folder))


NAMES = st.sampled_from([
    "fc.weight", "fc.bias", "midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight", "d2t",
    "t2d", "lm_head.weight", "lm_head.weight_packed", "embed_tokens.weight", "norm.weight", "midlayer.hidden_norm.weight",
    "layers.\u00b2.x", "layers.", "model.fc.weight",
    "layers.0.input_layernorm.weight", "fc_norm.0.weight", "input_norm.weight", "mtp.x", "", ".", "..", "layers.0.self_attn.q_proj",
    "midlayer.mlp.down_proj.qweight", "midlayer.mlp.down_proj.weight_scale", "k.k_scale",
]) | st.text(max_size=12)  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 16, 32, 64, 128, 192, 256]), max_size=3)
DTYPES = st.sampled_from(["F32", "BF16", "F16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "I8"])
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "I8": 1}


@FUZZ
@given(
    added=st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=5), dropped=st.sets(st.integers(0, 20), max_size=3), side=st.booleans()
)  # fmt: skip
def test_fuzzed_tensors(
    added: dict[str, tuple[str, list[int]]], dropped: set[int], side: bool, clean: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Valid files that hold other tensors than they should."""
    import math

    source = clean[0] if side else clean[1]
    with (source / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    kept = {name: (value["dtype"], value["shape"]) for i, (name, value) in enumerate(header.items()) if i not in dropped}
    entries, offset = {}, 0
    for name, (dtype, shape) in {**kept, **added}.items():
        end = offset + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    entries.pop("__metadata__", None)
    folder = tmp_path / f"tensors-{side}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    content = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + offset)
    answered(sb.diagnose(folder, clean[1], values=True) if side else sb.diagnose(clean[0], folder, values=True))


@FUZZ
@given(content=st.binary(max_size=200), keep=st.integers(0, 4000), where=st.integers(0, 4000))
def test_fuzzed_bytes(content: bytes, keep: int, where: int, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    original = (clean[1] / "model.safetensors").read_bytes()
    folder = tmp_path / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((clean[1] / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(original[: min(keep, where)] + content + original[where:])
    answered(sb.diagnose(clean[0], folder))


@FUZZ
@given(vocabulary=VALUES, added=VALUES, size=st.sampled_from([256, 272]))
def test_fuzzed_tokenizers(vocabulary: Any, added: Any, size: int, clean: tuple[Path, Path, Path], tmp_path: Path) -> None:
    config = json.loads((clean[0] / "config.json").read_text()) | {"vocab_size": size}
    folder = with_config(clean[0], tmp_path / "tokens", config)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    other = with_config(clean[1], tmp_path / "tokens-d", json.loads((clean[1] / "config.json").read_text()))
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": added}, "added_tokens": vocabulary}))
    answered(sb.diagnose(folder, other))
