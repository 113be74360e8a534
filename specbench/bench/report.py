"""The HTML report of an executed notebook: text, tables and figures, no code.

What enters: an executed notebook file. What leaves: one HTML file that opens without network. It does not know how the notebook was run.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic import write_bytes

# The lab template without the scripts that it would fetch from elsewhere.
TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block data_png scoped -%}
<div class="jp-RenderedImage jp-OutputArea-output">
<img src="data:image/png;base64,{{ output.data['image/png'] }}" alt="{{ output.metadata['alt'] | escape_html }}">
</div>
{%- endblock -%}
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def write_report(executed: Path, report: Path, parameters: Mapping[str, Any]) -> Path:
    """Write `executed` as HTML: no inputs, no progress bars, figures inline, the parameters in a table after the first cell."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    heading = executed.stem
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.splitlines()[0].lstrip("# ")
        elif cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_progress(output)]
            for output in cell.outputs:
                output.get("metadata", {})["alt"] = f"figure: {heading}"
    first = next((i for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown" and cell.source.startswith("#")), -1)
    notebook.cells.insert(first + 1, nbformat.v4.new_markdown_cell(parameter_table(parameters)))
    exporter = HTMLExporter(raw_template=TEMPLATE, exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": executed.stem}})
    write_bytes(report, body.encode())
    return report


def is_progress(output: Mapping[str, Any]) -> bool:
    """Whether an output shows work under way (a bar on stderr, a widget) and not a finding."""
    return output.get("name") == "stderr" or WIDGET in output.get("data", {})


def parameter_table(parameters: Mapping[str, Any]) -> str:
    """HTML rows `name | value`, escaped."""
    escaped = [(html.escape(name), html.escape(repr(value))) for name, value in parameters.items()]
    rows = "".join(f"<tr><td>{name}</td><td><code>{value}</code></td></tr>" for name, value in escaped)
    return f"<table><tr><th>parameter</th><th>value</th></tr>{rows}</table>"
