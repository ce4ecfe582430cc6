"""An exporter of spans for Serve's tracing, which leaves them in the session's folder, and those spans read again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

#: for RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH
IMPORT_PATH = "harness.spans:processors"


class ToFile(SpanExporter):
    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                context = span.get_span_context()
                line = {
                    "name": span.name,
                    "kind": span.kind.name,
                    "trace": context.trace_id,
                    "id": context.span_id,
                    "parent": None if span.parent is None else span.parent.span_id,
                    "attributes": dict(span.attributes or {}),
                }
                file.write(json.dumps(line) + "\n")
        return SpanExportResult.SUCCESS


def processors() -> list[SpanProcessor]:
    import ray._private.worker

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [SimpleSpanProcessor(ToFile(session / f"spans-{os.getpid()}.jsonl"))]


def ended(session: Path) -> list[dict[str, Any]]:
    """All spans that have ended in any process."""
    lines = [line for path in session.glob("spans-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]
