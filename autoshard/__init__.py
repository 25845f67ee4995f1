"""autoshard: one call from a single-device PyTorch model to the ranks of a mesh."""

from autoshard.api import autoshard
from autoshard.emit import ShardedModule
from autoshard.errors import AutoshardError, CaptureError, MeshError, ShardingError
from autoshard.mesh import MeshSpec
from autoshard.verify import verify

__all__ = [
    "AutoshardError",
    "CaptureError",
    "MeshError",
    "MeshSpec",
    "ShardedModule",
    "ShardingError",
    "autoshard",
    "verify",
]
