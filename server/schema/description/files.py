"""Describes files, uploads, containers and batches of requests."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.description.parts import INTEGER, METADATA, STRING, listed, nullable, of, page_of, ref
from server.shapes import Schema, or_null

_MEMORY: Schema = {"enum": ["1g", "4g", "16g", "64g"]}

FILE_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
_BINARY: Schema = {"type": "string", "format": "binary"}
_EXPIRES_AFTER = of(
    {"anchor": {"const": "created_at"}, "seconds": {**INTEGER, "minimum": 3600, "maximum": 2_592_000}}
)
_CREATE_BATCH = of(
    {"input_file_id": STRING, "endpoint": STRING, "completion_window": {"const": "24h"}},
    {
        "metadata": or_null(METADATA),
        "output_expires_after": of({"anchor": {"const": "created_at"}, "seconds": INTEGER}),
    },
)


_ASKED: Mapping[str, Schema] = {
    "CreateContainer": of(
        {"name": STRING},
        {
            "file_ids": listed(STRING),
            "expires_after": of({"anchor": {"const": "last_active_at"}, "minutes": INTEGER}),
            "memory_limit": _MEMORY,
            "network_policy": of({"type": {"const": "disabled"}}),
        },
    ),
    "CreateContainerFile": {
        "description": "Or a form (`multipart/form-data`) whose field `file` is one.",
        **of({"file_id": STRING}),
    },
    "CreateFile": of(
        {"file": _BINARY, "purpose": {"enum": [*FILE_PURPOSES]}},
        {
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {**INTEGER, "minimum": 3600, "maximum": 2_592_000},
        },
    ),
    "CreateUpload": of(
        {
            "filename": STRING,
            "purpose": {"enum": [*FILE_PURPOSES]},
            "bytes": {**INTEGER, "minimum": 0},
            "mime_type": STRING,
        },
        {"expires_after": _EXPIRES_AFTER},
    ),
    "AddUploadPart": of({"data": _BINARY}),
    "CompleteUpload": of({"part_ids": listed(STRING)}, {"md5": STRING}),
    "CreateBatch": _CREATE_BATCH,
}


_BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
_FILE = of(
    {
        **{name: STRING for name in ("id", "filename", "purpose")},
        "object": {"const": "file"},
        "bytes": INTEGER,
        "created_at": INTEGER,
        "status": {"const": "processed", "deprecated": True},
    },
    {"expires_at": INTEGER},
)


_CONTAINER = of(
    {
        **{name: STRING for name in ("id", "name", "status")},
        "object": {"const": "container"},
        "created_at": INTEGER,
        "last_active_at": INTEGER,
        "expires_after": of({"anchor": {"const": "last_active_at"}, "minutes": INTEGER}),
        "memory_limit": _MEMORY,
        "network_policy": of({"type": {"const": "disabled"}}),
    }
)

_CONTAINER_FILE = of(
    {
        **{name: STRING for name in ("id", "container_id", "path")},
        "object": {"const": "container.file"},
        "created_at": INTEGER,
        "bytes": INTEGER,
        "source": {"enum": ["user", "assistant"]},
    }
)

_FAULT = of({"code": STRING, "message": STRING, **nullable({"param": STRING, "line": INTEGER})})

_TOLD: Mapping[str, Schema] = {
    "Batch": of(
        {
            "id": STRING,
            "object": {"const": "batch"},
            "endpoint": STRING,
            "input_file_id": STRING,
            "completion_window": STRING,
            "status": {"enum": ["validating", "in_progress", "finalizing", "cancelling", *_BATCH_ENDS]},
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "request_counts": of(dict.fromkeys(("total", "completed", "failed"), INTEGER)),
            "errors": or_null(of({"object": {"const": "list"}, "data": listed(_FAULT)})),
            "metadata": or_null(METADATA),
            "usage": or_null(
                of(
                    {
                        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER),
                        "input_tokens_details": of({"cached_tokens": INTEGER}),
                        "output_tokens_details": of({"reasoning_tokens": INTEGER}),
                    }
                )
            ),
            **{
                f"{step}_at": or_null(INTEGER)
                for step in ("in_progress", "finalizing", "cancelling", *_BATCH_ENDS)
            },
            **{name: or_null(STRING) for name in ("model", "output_file_id", "error_file_id")},
        }
    ),
    "Batches": page_of(ref("Batch")),
    "Container": _CONTAINER,
    "Containers": page_of(ref("Container")),
    "ContainerFile": _CONTAINER_FILE,
    "ContainerFiles": page_of(ref("ContainerFile")),
    "File": _FILE,
    "Files": page_of(ref("File")),
    "Upload": of(
        {
            **{name: STRING for name in ("id", "filename", "purpose")},
            "object": {"const": "upload"},
            "bytes": INTEGER,
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "status": {"enum": ["pending", "completed", "cancelled", "expired"]},
            "file": or_null(ref("File")),
        }
    ),
    "UploadPart": of(
        {
            "id": STRING,
            "object": {"const": "upload.part"},
            "created_at": INTEGER,
            "upload_id": STRING,
        }
    ),
}


def file_components() -> Mapping[str, Schema]:
    """The schemas of these families, by name."""
    return {**_ASKED, **_TOLD}
