"""Every setting of a plan: its value, its source, and what happens where files are silent, contradict themselves or one another."""

from __future__ import annotations

import json

import pytest
from tiny import DRAFT_VOCAB, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, draft_config, draft_tensors, tiny_draft, tiny_verifier, write

import specbench as sb
from specbench.errors import ConfigError
from specbench.policies import POLICIES

LAYER = "transformer_layer_config."
IDS = "eagle_aux_hidden_state_layer_ids"
SPELLED = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "head_dim": HEAD_DIM,
}  # fmt: skip


@pytest.fixture
def plan_of(tiny, tmp_path):
    """A plan for the tiny draft with some config keys changed (None removes one; `layer` changes the nested section)."""

    def make(policy="draft", layer=None, verifier="verifier", overrides=None, tensors=None, drop=(), **changes):
        config = draft_config()
        for section, new in ((config["transformer_layer_config"], layer or {}), (config, changes)):
            section |= new
            for key in [key for key, value in section.items() if value is None]:
                del section[key]
        kept = {name: value for name, value in (draft_tensors() | (tensors or {})).items() if name not in drop}
        folder = write(tmp_path / "draft", config, kept)
        return sb.resolve(sb.open_pair(tiny.get(verifier, verifier), folder), policy, overrides)

    return make


def refused(plan_of, *words, **changes):
    with pytest.raises(ConfigError) as caught:
        plan_of(**changes)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_every_setting_names_its_source(plan_of):
    plan = plan_of()
    expected = {
        **{name: (value, f"draft config.json: {LAYER}{name}") for name, value in SPELLED.items()},
        "family": ("speculators", "draft tensors"),
        "quantization": (None, "only plain .weight tensors"),
        "edge_quantization": (None, "only plain .weight tensors"),
        "embed_tokens": ("verifier", "verifier tensors: model.embed_tokens.weight"),
        "lm_head": ("draft", "draft tensors: lm_head.weight"),
        "vocab_size": (VOCAB, "verifier tensors: model.embed_tokens.weight"),
        "draft_vocab_size": (DRAFT_VOCAB, "draft_vocab_size in config.json, rows of lm_head, entries of d2t"),
        "d2t": ("draft", "draft tensors: d2t"),
        "num_hidden_layers": (1, "draft tensors: layers.*"),
        "target_hidden_size": (HIDDEN, "verifier config.json"),
        "use_fc": (True, "draft tensors: fc"),
        "norm_before_residual": (True, "draft config.json: norm_before_residual"),
        "norm_output": (False, "default false"),
        "aux_layers": ((2, 4, 5), f"draft config.json: {IDS}"),
        "dtype": ("float32", "config.json: dtype"),
        "checks": ("strict", "policy draft"),
    }
    for name, (value, source) in expected.items():
        setting = plan.settings[name]
        assert setting.value == plan[name] == value, name
        assert source in setting.source, (name, setting.source)
    assert plan["rope"].theta == 10000.0 and plan.settings["rope"].source == f"draft config.json: {LAYER}rope_theta"
    assert all(setting.source for setting in plan.settings.values())
    assert plan.warnings == []


def test_the_table_shows_every_setting_in_order(plan_of):
    plan = plan_of(verifier="w4a16", policy="vllm-0.11.0")
    table = plan.to_frame()
    assert list(table.columns) == ["setting", "value", "source", "verifier", "note"]
    assert list(table["setting"]) == list(plan.settings)
    assert not table.isna().any().any()
    row = table.set_index("setting").loc["quantization"]
    assert row["value"] == row["verifier"] == "compressed-tensors pack-quantized W4"
    assert row["note"] == "the draft's own files say none"
    assert all(len(str(value)) < 200 for value in table["value"])


def test_what_differs_from_the_verifier_is_noted(plan_of, tmp_path):
    plan = plan_of(verifier=tiny_verifier(tmp_path / "v", num_key_value_heads=4, rope_theta=5e5))
    assert plan.settings["num_key_value_heads"].note == plan.settings["rope"].note == "differs from the verifier's"
    assert (plan["num_key_value_heads"], plan.settings["num_key_value_heads"].verifier) == (KV_HEADS, 4)
    assert plan["rope"].theta == 10000.0
    assert plan.settings["intermediate_size"].note == ""


@pytest.mark.parametrize("name", [name for name in SPELLED if name not in ("head_dim", "num_key_value_heads")])
def test_a_size_that_is_missing_is_named_and_never_guessed(plan_of, name):
    refused(plan_of, f"config.json lacks {LAYER}{name}", layer={name: None})


def test_head_dim_is_read_from_the_tensors_where_the_config_is_silent(plan_of):
    plan = plan_of(layer={"head_dim": None})
    assert (plan["head_dim"], plan.settings["head_dim"].source) == (HEAD_DIM, "draft tensors: rows of q_proj / num_attention_heads")


@pytest.mark.parametrize(
    ("layer", "theta", "source"),
    [
        ({"rope_theta": 5e5}, 5e5, f"{LAYER}rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}, 7e5, f"{LAYER}rope_parameters.rope_theta"),
        ({"rope_theta": 7e5, "rope_parameters": {"rope_theta": 7e5}}, 7e5, f"{LAYER}rope_parameters.rope_theta"),
        ({"rope_theta": None}, 10000.0, "default 10000"),
    ],
)
def test_where_the_rotary_base_comes_from(plan_of, layer, theta, source):
    setting = plan_of(layer=layer).settings["rope"]
    assert setting.value.theta == theta and source in setting.source


def test_two_rotary_bases_are_refused(plan_of):
    refused(plan_of, "700000.0", "10000.0", "correct one of them", layer={"rope_parameters": {"rope_theta": 700000.0}})


@pytest.mark.parametrize("ids", [[2, 4, 5], [0, 3, 8], [1, 2, 3]])
def test_explicit_layer_ids(plan_of, ids):
    setting = plan_of(**{IDS: ids}).settings["aux_layers"]
    assert (setting.value, setting.source, setting.warning) == (tuple(ids), f"draft config.json: {IDS}", False)


@pytest.mark.parametrize("count", [8, 9, 30])
def test_default_layer_ids_are_said_to_be_guessed(plan_of, tmp_path, count):
    setting = plan_of(verifier=tiny_verifier(tmp_path / "v", layers=count), **{IDS: None}).settings["aux_layers"]
    assert setting.value == (2, count // 2, count - 3)
    assert setting.source == "default (2, n // 2, n - 3)"
    assert setting.warning and f"guessed: config.json has no {IDS}" in setting.note


def test_a_policy_that_never_reads_layer_ids_says_so(plan_of):
    setting = plan_of(policy="vllm-0.11.0", **{IDS: [1, 2, 3]}).settings["aux_layers"]
    assert setting.value == (2, 4, 5)
    assert setting.warning and "config.json says [1, 2, 3], which policy vllm-0.11.0 never reads" in setting.note


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 4, 9], "[9] lie outside 0..8"),
        ([-1, 4, 5], "[-1] lie outside 0..8"),
        ([2, 2, 5], "distinct ascending"),
        ([5, 4, 2], "distinct ascending"),
        ([2, 4], "fc reads 3 states, but 2 ids"),
        ([2, 4, 5, 6], "fc reads 3 states, but 4 ids"),
        ([], "a list of layer ids is expected"),
        (4, "a list of layer ids is expected"),
        ("2,4,5", "a list of layer ids is expected"),
        ([2.5, 4, 5], "a list of layer ids is expected"),
        ([True, 4, 5], "a list of layer ids is expected"),
    ],
    ids=str,
)
def test_impossible_layer_ids_are_refused(plan_of, ids, words):
    refused(plan_of, IDS, words, **{IDS: ids})


@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual_is_the_drafts(plan_of, value):
    setting = plan_of(norm_before_residual=value).settings["norm_before_residual"]
    assert (setting.value, setting.source, setting.warning) == (value, "draft config.json: norm_before_residual", False)


def test_an_absent_norm_before_residual_is_the_formats_default_and_warns(plan_of):
    setting = plan_of(norm_before_residual=None).settings["norm_before_residual"]
    assert setting.value is True and setting.warning
    assert "default of the speculators format" in setting.source and "state it in config.json" in setting.note


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_output"])
@pytest.mark.parametrize("value", ["false", "true", 2, [], {}], ids=str)
def test_a_switch_that_is_no_switch_is_refused(plan_of, name, value):
    refused(plan_of, f"{name} is {value!r}", "true or false", **{name: value})


def test_the_verifiers_hidden_size_must_be_the_one_it_was_trained_on(plan_of, tmp_path):
    other = tiny_verifier(tmp_path / "v", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    own_embedding = {"embed_tokens.weight": draft_tensors()["lm_head.weight"].repeat(VOCAB // DRAFT_VOCAB, 1)}
    refused(plan_of, "hidden_size 64", "cannot be borrowed", verifier=other)
    refused(plan_of, "hidden size 64", "has 32", "another verifier's draft", verifier=other, tensors=own_embedding)
    refused(plan_of, "hidden size 48 (target_hidden_size)", "has 64", target_hidden_size=48)
    assert plan_of(target_hidden_size=64)["target_hidden_size"] == 64


def test_fc_must_fit_whole_states(plan_of):
    cut = draft_tensors()["fc.weight"][:, :160]
    refused(plan_of, "fc.weight is [64, 160]", "multiple of the verifier's hidden size 64", tensors={"fc.weight": cut})


def test_a_draft_without_fc_is_refused(plan_of):
    refused(plan_of, "holds no fc", "use_aux_hidden_state", drop=("fc.weight",))


def test_a_draft_without_layers_is_refused(plan_of):
    refused(plan_of, "not an EAGLE-3 draft", drop=[name for name in draft_tensors() if name.startswith("layers.")])


def test_the_verifier_is_no_draft(tiny, tmp_path):
    with pytest.raises(ConfigError, match="a checkpoint of its own"):
        sb.open_pair(tiny["verifier"], tiny["verifier"])
    with pytest.raises(ConfigError, match="a checkpoint of its own"):
        sb.open_pair(tiny["verifier"], "")
    with pytest.raises(ConfigError, match="not an EAGLE-3 draft"):
        sb.resolve(sb.open_pair(tiny["verifier"], tiny_verifier(tmp_path / "copy")))


def test_vocabulary_sizes_that_conflict_are_all_named(plan_of):
    refused(plan_of, "draft_vocab_size in config.json 32", "rows of lm_head 64", "entries of d2t 64", draft_vocab_size=32)


def test_layer_counts_come_from_the_tensors(plan_of):
    plan = plan_of(layer={"num_hidden_layers": 40})
    assert plan["num_hidden_layers"] == 1
    assert plan.settings["num_hidden_layers"].note == "config.json says 40; the stored tensors decide"


def test_dtype_is_the_verifiers(plan_of, tmp_path):
    plan = plan_of(verifier=tiny_verifier(tmp_path / "v", dtype="bfloat16"))
    assert plan["dtype"] == "bfloat16"
    assert "the draft's config says float32" in plan.settings["dtype"].note


def test_quantization_is_the_drafts_or_under_an_old_engine_the_verifiers(plan_of):
    ours, theirs = plan_of(verifier="w4a16"), plan_of(verifier="w4a16", policy="vllm-0.11.0")
    assert ours["quantization"] is None and not ours.settings["quantization"].warning
    assert theirs["quantization"] == theirs.pair.verifier.quantization
    setting = theirs.settings["quantization"]
    assert setting.source.startswith("verifier ") and setting.source.endswith("quantization_config") and setting.warning
    assert theirs["edge_quantization"] is None and "always plain" in theirs.settings["edge_quantization"].source
    assert "quantization" in set(ours.diff(theirs)["setting"])


def test_an_unknown_policy_is_refused_with_the_known_ones(plan_of):
    refused(plan_of, "unknown policy 'vllm-99'", *POLICIES, policy="vllm-99")


def test_overrides_are_sources_of_their_own(plan_of):
    plan = plan_of(overrides={"aux_layers": [1, 2, 3], "norm_before_residual": False, "rope_theta": 123.0})
    assert (plan["aux_layers"], plan["norm_before_residual"], plan["rope"].theta) == ((1, 2, 3), False, 123.0)
    assert {plan.settings[name].source for name in ("aux_layers", "norm_before_residual", "rope")} == {"override"}
    refused(plan_of, "unknown override 'rope'", overrides={"rope": 1})
    refused(plan_of, "override aux_layers", "outside 0..8", overrides={"aux_layers": [1, 2, 30]})


def test_resolving_reads_no_weight(tiny, tmp_path):
    """The bytes of every tensor may be garbage; only headers count."""
    draft = tiny_draft(tmp_path / "draft")
    path = draft / "model.safetensors"
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = b"\xff" * (len(content) - begin)
    path.write_bytes(content)
    for policy in POLICIES:
        assert sb.resolve(sb.open_pair(tiny["verifier"], draft), policy)["num_hidden_layers"] == 1


def test_a_config_that_is_no_config_is_refused(tiny, tmp_path):
    draft = tiny_draft(tmp_path / "draft")
    (draft / "config.json").write_text(json.dumps({"architectures": "x"}))
    with pytest.raises(ConfigError, match="hidden_size"):
        sb.resolve(sb.open_pair(tiny["verifier"], draft))
