"""The row that every measurement is kept as: its columns with type and meaning, and how tables of older versions become tables of this one.

What enters: measured values; Arrow tables of any version so far. What leaves: Arrow and pandas tables with the columns of `Row`. It knows
no file and no figure; every rate is derived later (`metrics`, `summary`).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 3
# Columns that a version added; where a table of an older version lacks them, `upgrade` says what it meant.
ADDED = {
    2: (
        "proposer", "draft_shape", "draft_sampling", "batch_size", "batch", "top_k", "top_p", "min_p", "seed", "prompt_set",
        "nodes_per_round", "emitted_at_s", "draft_prefill_s", "peak_memory_bytes",
    ),
    3: ("draft_p_min", "repetition_penalty", "presence_penalty", "frequency_penalty"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt turn under one configuration, in one repeat of one run. Raw: counts and seconds, no rate.

    A failed row keeps no count or time of an earlier one. Times are seconds, None where not measured; decode_s = draft_prefill_s +
    draft_s + verify_s + other_s and total_s = prefill_s + decode_s. In a batch they are what passed while the sequence was in it.
    """

    run_id: Annotated[str, "name of the run folder, after that of the folder around it"]
    schema_version: Annotated[int, "version of these columns"] = SCHEMA_VERSION
    engine: Annotated[str, 'whose loop decoded: "specbench", "transformers"']
    verifier: Annotated[str, "verifier as given: hub id or folder"]
    verifier_format: Annotated[str, 'its weights as loaded: "bf16", "w4a16", ...']
    draft: Annotated[str, 'draft as given; "" where none exists'] = ""
    policy: Annotated[str, 'policy that the draft was loaded under; "" where none exists'] = ""
    proposer: Annotated[str, 'who proposed: "eagle3", "prompt lookup", "" for plain decoding'] = ""
    draft_shape: Annotated[str, '"chain"; "adaptive chain": its length is chosen for each round; or the shape of a tree'] = "chain"
    k: Annotated[int, "num_speculative_tokens: draft tokens of a full round (most, if adaptive; depth of a tree); 0 for plain decoding"]
    draft_p_min: Annotated[float | None, "probability of a whole chain, to its draft, below which it ends; None where not used"] = None
    draft_sampling: Annotated[str, '"greedy": the draft proposes its best tokens at any temperature; "probabilistic": it draws them'] = (
        "greedy"
    )
    batch_size: Annotated[int, "sequences decoded together at most"] = 1
    batch: Annotated[int, "rows of a run with the same configuration, repeat and number here shared one clock"] = 0
    temperature: Annotated[float, "0 is greedy"] = 0.0
    top_k: Annotated[int | None, "sampling limit; None where not used"] = None
    top_p: Annotated[float | None, "sampling limit; None where not used"] = None
    min_p: Annotated[float | None, "sampling limit; None where not used"] = None
    repetition_penalty: Annotated[float | None, "divides scores of tokens seen; None where not used"] = None
    presence_penalty: Annotated[float | None, "off scores of tokens written; None where not used"] = None
    frequency_penalty: Annotated[float | None, "off scores of tokens written, each time; None where not used"] = None
    seed: Annotated[int | None, "of the sampling; None where greedy"] = None
    dtype: Annotated[str, "of activations"]
    device: Annotated[str, "of the verifier"]
    threads: Annotated[int, "of torch on the CPU"]
    max_new_tokens: Annotated[int, "limit of output tokens"]
    prompt_set: Annotated[str, 'name of the prompt set; "" where prompts were given one by one'] = ""
    prompt_set_hash: Annotated[str, "sha256 of ids, categories and texts of all prompts of the run (`prompts.prompt_set_hash`)"]
    question_id: Annotated[int, "of the prompt within its set"]
    turn: Annotated[int, "place in the conversation, from 0"]
    category: Annotated[str, "of the prompt"]
    repeat: Annotated[int, "from 0"]
    status: Annotated[str, '"ok" or "failed"']
    error: Annotated[str, 'what stopped a failed row; "" if ok'] = ""
    finish_reason: Annotated[str, '"eos", "length", "context"; "" if failed'] = ""
    num_prompt_tokens: Annotated[int | None, "tokens of the prompt, chat template included; None if failed before it was known"] = None
    num_output_tokens: Annotated[int, "tokens of the output, an EOS included"] = 0
    accepted_per_round: Annotated[
        list[int], "draft tokens kept in each round, bonus token not counted; the first output token is no round's"
    ]
    proposed_per_round: Annotated[
        list[int], "the most that each round could have kept: its draft tokens, in a tree its longest path; 0: none drafted"
    ]
    nodes_per_round: Annotated[list[int], "draft tokens that the verifier scored in each round: more than proposed in a tree"] = field(
        default_factory=list
    )
    emitted_at_s: Annotated[list[float], "when the tokens of the prompt pass and of each round were there; empty where not measured"] = (
        field(default_factory=list)
    )
    token_ids: Annotated[list[int], "the output"]
    prefill_s: Annotated[float | None, "from the start to the first token: time to first token (TTFT)"] = None
    draft_prefill_s: Annotated[float | None, "the draft's own prompt pass; None in rows of version 1, whose draft_s holds it"] = None
    draft_s: Annotated[float | None, "proposing, and feeding the draft"] = None
    verify_s: Annotated[float | None, "passes of the verifier after the first token"] = None
    other_s: Annotated[float | None, "the rest of decode_s"] = None
    decode_s: Annotated[float | None, "from the first token to the last"] = None
    total_s: Annotated[float | None, "from the start to the last token"] = None
    peak_memory_bytes: Annotated[
        int | None, "highest memory of the process meanwhile: allocated on CUDA, resident on a CPU; all models in it"
    ] = None


NULLABLE_INTEGERS = ("num_prompt_tokens", "top_k", "seed", "peak_memory_bytes")


def schema() -> pa.Schema:
    """The Arrow schema of a table of rows, read off `Row`; each column carries its meaning as metadata."""
    import pyarrow as pa

    arrow: dict[Any, Any] = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        list[int]: pa.list_(pa.int64()),
        list[float]: pa.list_(pa.float64()),
    }
    fields = []
    for name, hint in typing.get_type_hints(Row, include_extras=True).items():
        kind, meaning = typing.get_args(hint)
        nullable = isinstance(kind, types.UnionType)
        fields.append(pa.field(name, arrow[typing.get_args(kind)[0] if nullable else kind], nullable, {"meaning": meaning}))
    return pa.schema(fields)


def describe() -> pd.DataFrame:
    """The documentation of a row: column | type | may be missing | since (schema version) | meaning."""
    import pandas as pd

    since = {name: version for version, names in ADDED.items() for name in names}
    rows = [(f.name, str(f.type), f.nullable, since.get(f.name, 1), f.metadata[b"meaning"].decode()) for f in schema()]
    return pd.DataFrame(rows, columns=["column", "type", "may be missing", "since", "meaning"])


def to_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a tidy table with the columns of `Row`; empty tables have them too. Whole numbers that may be missing are Int64."""
    import pyarrow as pa

    return to_pandas(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema()))


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """An Arrow table of rows as a pandas one."""
    frame: pd.DataFrame = table.to_pandas()
    return frame.astype(dict.fromkeys(NULLABLE_INTEGERS, "Int64"))


def upgrade(table: pa.Table, origin: str) -> pa.Table:
    """A stored table of this or an older version, with the columns and types of this one.

    Raises:
        DataError: a newer version, or columns that are not those of the version that it names.
    """
    import pyarrow as pa

    expected = schema()
    versions: set[Any] = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if not all(isinstance(version, int) and 1 <= version <= SCHEMA_VERSION for version in versions):
        raise DataError(
            f"{origin} has schema version {sorted(map(str, versions))}; this version of specbench reads 1 to {SCHEMA_VERSION}: "
            "a newer one wrote it, or it is no table of rows"
        )
    version = min(versions, default=SCHEMA_VERSION)
    new = {name for added, names in ADDED.items() if added > version for name in names}
    missing, unknown = set(expected.names) - set(table.column_names) - new, set(table.column_names) - set(expected.names)
    if missing or unknown:
        raise DataError(f"{origin} is not a table of rows: it lacks {sorted(missing)} and has unknown {sorted(unknown)}")
    for name in sorted(new - set(table.column_names)):
        table = table.append_column(expected.field(name), pa.array(_meant(name, table), expected.field(name).type))
    current = pa.array([SCHEMA_VERSION] * len(table), pa.int64())
    table = table.set_column(table.column_names.index("schema_version"), "schema_version", current)
    return table.select(expected.names).cast(expected)


def _meant(name: str, table: pa.Table) -> list[Any]:
    """What rows of an older version say about a column that they lack."""
    if name == "nodes_per_round":  # there were chains only
        return list(table["proposed_per_round"].to_pylist())
    if name == "proposer":  # and only specbench's own loop had a draft
        return [
            "eagle3" if engine == "specbench" and k else ""
            for engine, k in zip(*(table[n].to_pylist() for n in ("engine", "k")), strict=True)
        ]
    if name == "emitted_at_s":
        return [[]] * len(table)
    if name == "batch":  # each row had a clock of its own
        return list(range(len(table)))
    return [Row.__dataclass_fields__[name].default] * len(table)
