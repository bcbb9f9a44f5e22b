"""Where the plugin lies, and the environment in which NCCL finds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NAME", "PLUGIN_VARIABLE", "enable", "environment", "plugin_path"]

NAME = "bagua"  # of the plugin: NCCL before 2.22 adds libnccl-net- and .so to it
PLUGIN_VARIABLE = "NCCL_NET_PLUGIN"
_SEARCH_VARIABLE = "LD_LIBRARY_PATH"
_LIBRARY = Path(__file__).with_name(f"libnccl-net-{NAME}.so")


def plugin_path() -> Path:
    """Return the plugin's file.

    Raises:
        RuntimeError: if it was not built with the package.

    Examples:
        >>> bagua.net.plugin_path().name
        'libnccl-net-bagua.so'
    """
    if not _LIBRARY.exists():
        raise RuntimeError(
            f"Bagua-Net was not built ({_LIBRARY.name} is missing): install a C++17 compiler and reinstall bagua, "
            "or run `python setup.py build_ext --inplace`; it is for Linux only"
        )
    return _LIBRARY


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set, beside those of `env`, so that NCCL loads the plugin.

    The variable holds the path, which NCCL takes from version 2.22 on. The folder goes to the front of the loader's
    search path, so that `NCCL_NET_PLUGIN=bagua` works in processes started with it, whatever the version.

    Raises:
        RuntimeError: if the plugin was not built.
        ValueError: if `env` names another plugin already, or none.

    Examples:
        >>> sorted(bagua.net.environment({}))
        ['LD_LIBRARY_PATH', 'NCCL_NET_PLUGIN']
    """
    path = plugin_path()
    present = env.get(PLUGIN_VARIABLE)
    if present and present not in (NAME, str(path)):
        raise ValueError(f"{PLUGIN_VARIABLE}={present} is set already and names another plugin; unset it first")
    folders = [folder for folder in env.get(_SEARCH_VARIABLE, "").split(os.pathsep) if folder]
    if str(path.parent) not in folders:
        folders.insert(0, str(path.parent))
    return {PLUGIN_VARIABLE: present or str(path), _SEARCH_VARIABLE: os.pathsep.join(folders)}


def enable() -> Path:
    """Have NCCL load the plugin, in this process and in those it starts; return the plugin's file.

    NCCL reads the environment when the first communicator is made: call this before, and on all ranks. It changes
    nothing for processes that do not use NCCL.

    Raises:
        RuntimeError: if the plugin was not built.
        ValueError: if the environment names another plugin already.

    Examples:
        >>> file = bagua.net.enable()  # before bagua.init_process_group
        >>> file.name
        'libnccl-net-bagua.so'
    """
    os.environ.update(environment(os.environ))
    return plugin_path()
