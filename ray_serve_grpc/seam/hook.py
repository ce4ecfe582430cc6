"""Patches modules of Ray right after their first import.

The `.pth` of the wheel runs `arm()` in every Python process of the environment, so this
file imports nothing that a bare interpreter has not loaded already (typing included: it
alone would cost more than the rest). What a patch needs is imported when a target is.
"""

import sys
from _thread import get_ident
from os import environ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: module of Ray -> name of the patch that goes on it
TARGETS = {
    "ray.serve._private.constants": "constants",
    "ray.serve._private.replica": "replica",
    "ray.serve._private.request_router.replica_wrapper": "client",
    "ray.serve._private.router": "router",
    "ray.serve.handle": "handle",
}


def arm() -> bool:
    """Puts the hook in front of the import machinery, once. False where the environment says not to."""
    if environ.get("RAY_SERVE_GRPC_NATIVE", "").strip() == "0":
        return False
    if not armed():
        sys.meta_path.insert(0, Hook(TARGETS, patch_target))
    return True


def armed() -> bool:
    return any(isinstance(finder, Hook) for finder in sys.meta_path)


def patch_target(module: "ModuleType", part: str) -> None:
    from ray_serve_grpc.seam import activation

    activation.apply(part, module)


class Hook:
    """A meta-path finder that lets the other finders find a target, and has a say when it was executed."""

    def __init__(self, targets: "Mapping[str, str]", patch: "Callable[[ModuleType, str], None]") -> None:
        self._targets = targets
        self._patch = patch
        # Another hook of this kind asks us while we ask it: (thread, module) under way here.
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        part = self._targets.get(name)
        if part is None:
            return None
        key = (get_ident(), name)
        if key in self._asking:
            return None
        self._asking.add(key)
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._asking.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = PatchingLoader(spec.loader, part, self._patch)  # type: ignore[assignment, arg-type]
        return spec

    def _found_by_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class PatchingLoader:
    """Stands in for a module's loader until the module was executed, then leaves no trace in it."""

    def __init__(self, loader: "Loader", part: str, patch: "Callable[[ModuleType, str], None]") -> None:
        self._loader = loader
        self._part = part
        self._patch = patch

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._patch(module, self._part)
        except Exception as error:
            # Ray's import goes on whatever went wrong here, even in reporting it.
            print(f"ray_serve_grpc: {module.__name__} was left as it is: {error!r}", file=sys.stderr)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
