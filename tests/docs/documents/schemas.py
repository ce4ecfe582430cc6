"""What the YAML of the pages and examples must look like."""

from __future__ import annotations

from typing import Any

import jsonschema
import yaml
from ray.serve.schema import ServeDeploySchema

_TEXT = {"type": "string", "minLength": 1}
_CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "properties": {
        "name": _TEXT,
        "image": _TEXT,
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "value"],
                "properties": {"name": _TEXT, "value": {"type": "string"}},  # a number here is refused by Kubernetes
            },
        },
        "resources": {
            "type": "object",
            "required": ["limits", "requests"],
            "additionalProperties": {
                "type": "object",
                "properties": {"memory": {"type": "string", "pattern": "^[0-9]+(Mi|Gi)$"}},
            },
        },
    },
}
_GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "properties": {
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {
            "type": "object",
            "required": ["spec"],
            "properties": {
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": {"containers": {"type": "array", "minItems": 1, "items": _CONTAINER}},
                }
            },
        },
    },
}

#: The parts of KubeRay's RayService (ray.io/v1) that a Serve application needs.
RAY_SERVICE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
        "spec": {
            "type": "object",
            "required": ["serveConfigV2", "rayClusterConfig"],
            "additionalProperties": False,
            "properties": {
                "serveConfigV2": _TEXT,
                "rayClusterConfig": {
                    "type": "object",
                    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
                    "additionalProperties": False,
                    "properties": {
                        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                        "headGroupSpec": _GROUP,
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "allOf": [_GROUP],
                                "required": ["groupName", "replicas", "minReplicas", "maxReplicas"],
                            },
                        },
                    },
                },
            },
        },
    },
}


def check(document: Any, place: str) -> None:
    """Raises what the schema that fits `document` raises.

    AssertionError: there is none that fits.
    """
    if document.get("kind") == "RayService":
        jsonschema.validate(document, RAY_SERVICE)
        ServeDeploySchema.model_validate(yaml.safe_load(document["spec"]["serveConfigV2"]))
    elif "applications" in document:
        ServeDeploySchema.model_validate(document)
    else:
        raise AssertionError(f"{place}: no schema here fits this YAML")
