"""Settings: one frozen tree, from a YAML file, the environment and flags, in rising order."""

from .bridge import core_settings
from .checks import Problem, unreadable_files, warnings
from .load import ConfigError, load_config
from .runtime import endpoint_of, prepare_socket_dir, remove_socket, runtime_dir
from .schema import Config
from .transport import transfer_environment, write_timeout_s

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "core_settings",
    "endpoint_of",
    "load_config",
    "prepare_socket_dir",
    "remove_socket",
    "runtime_dir",
    "transfer_environment",
    "unreadable_files",
    "warnings",
    "write_timeout_s",
]
