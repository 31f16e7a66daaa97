"""Options of sessions and of runs, as ONNX Runtime has them.

What has a counterpart takes effect: the numbers of threads, the execution mode, dims by name,
profiles, termination. What steers ONNX Runtime's own allocators and optimizer is kept and told
back, and a session warns of it; logs are those of ``logging.getLogger("penstock")``
(``docs/coming-from.md`` lists all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from penstock.compat.onnxruntime.environment import OrtEpDevice, OrtExecutionProviderDevicePolicy
from penstock.compat.onnxruntime.unavailable import OF_RUN_OPTIONS, OF_SESSION_OPTIONS, lacking
from penstock.executors.control import CancelToken

if TYPE_CHECKING:
    from penstock.compat.onnxruntime.values import OrtValue


class GraphOptimizationLevel(IntEnum):
    """The extent to which ONNX Runtime optimizes; Penstock always does as far as answers allow."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Whether independent nodes may run at the same time."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """An order of nodes; plans have an order of their own."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Configured:
    """Options with entries of ONNX Runtime's configuration, which are kept and told back."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _add_entry(self, key: str, value: str) -> None:
        """Keep an entry of ONNX Runtime's configuration.

        Args:
            key: The name of the entry.
            value: Its text.
        """
        self._entries[key] = value

    def _entry(self, key: str) -> str:
        """An entry. Raises ``RuntimeError`` if there is none of this key.

        Args:
            key: The name of the entry.
        """
        if key not in self._entries:
            options = type(self).__name__
            raise RuntimeError(f"{options} does not have configuration with key: {key}")
        return self._entries[key]


_IGNORED = (
    "graph_optimization_level",
    "execution_order",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "use_deterministic_compute",
    "use_per_session_threads",
)
# Penstock does as these say.
_SATISFIED = {("session.intra_op.allow_spinning", "0"), ("session.inter_op.allow_spinning", "0")}


@lacking(OF_SESSION_OPTIONS)
class SessionOptions(_Configured):
    """Options of an ``InferenceSession``."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 0
        """cores that a run may keep busy; 0: all of the process"""
        self.inter_op_num_threads = 0
        """more cores for independent nodes, with ``ORT_PARALLEL``"""
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.enable_profiling = False
        self.profile_file_prefix = "onnxruntime_profile_"
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.execution_order = ExecutionOrder.DEFAULT
        self.enable_cpu_mem_arena = True
        self.enable_mem_pattern = True
        self.enable_mem_reuse = True
        self.use_deterministic_compute = False
        self.use_per_session_threads = True
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.optimized_model_filepath = ""
        self.free_dims: dict[str, int] = {}
        """dims by name, of ``add_free_dimension_override_by_name``"""
        self.initializers: dict[str, OrtValue] = {}
        """values by name, of ``add_initializer``"""
        self._providers: list[str] = []
        self._policy = OrtExecutionProviderDevicePolicy.DEFAULT

    def _without_effect(self) -> list[str]:
        """The options that have other values than by default, and change nothing."""
        default = SessionOptions()
        names = [name for name in _IGNORED if getattr(self, name) != getattr(default, name)]
        names += ["set_provider_selection_policy"] if self._policy else []
        return names + [key for key, x in self._entries.items() if (key, x) not in _SATISFIED]

    add_session_config_entry = _Configured._add_entry
    get_session_config_entry = _Configured._entry

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Let a dim of this name have a size; inputs of other sizes are refused.

        Args:
            name: The name of a dim.
            size: Its size.
        """
        self.free_dims[name] = int(size)

    def add_provider(self, name: str, options: dict[str, str]) -> None:
        """Ask for a provider, as ``providers=`` of the session does.

        Args:
            name: Its name.
            options: Not looked at.
        """
        self._providers.append(name)

    def add_provider_for_devices(
        self, devices: Sequence[OrtEpDevice], options: Mapping[str, str]
    ) -> None:
        """Ask for the provider of devices, as ``providers=`` of the session does.

        Args:
            devices: Of ``get_ep_devices``.
            options: Not looked at.
        """
        self._providers += [device.ep_name for device in devices[:1]]

    def set_provider_selection_policy(self, policy: OrtExecutionProviderDevicePolicy) -> None:
        """Without effect, of which a session warns: there is one device.

        Args:
            policy: What to prefer.
        """
        self._policy = policy

    def has_providers(self) -> bool:
        """Whether ``add_provider`` was called."""
        return bool(self._providers)

    def register_custom_ops_library(self, path: str) -> NoReturn:
        """Not available: operations of libraries for ONNX Runtime are built against its ABI.

        Args:
            path: The file.
        """
        raise NotImplementedError(
            f"{path}: libraries of custom operations run in ONNX Runtime alone; register the "
            "operation in Python (penstock.extend)"
        )

    def add_initializer(self, name: str, value: OrtValue) -> None:
        """Give an initializer of the model another value. The session reads the memory of
        ``value``, which must not be changed meanwhile.

        Args:
            name: Its name.
            value: A tensor of the same type.
        """
        self.initializers[name] = value

    def add_external_initializers(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """``add_initializer`` for several. The files of the model's external data must be there
        all the same.

        Args:
            names: Their names.
            values: Their values.
        """
        self.initializers.update(zip(names, values, strict=True))


@lacking(OF_RUN_OPTIONS)
class RunOptions(_Configured):
    """Options of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.only_execute_path_to_fetches = False  # a run never executes anything else
        self.token = CancelToken()
        """what setting ``terminate`` cancels"""
        self._terminate = False

    add_run_config_entry = _Configured._add_entry
    get_run_config_entry = _Configured._entry

    @property
    def terminate(self) -> bool:
        """Set it to end all runs with these options; back to False to let new ones begin."""
        return self._terminate

    @terminate.setter
    def terminate(self, value: bool) -> None:
        self._terminate = bool(value)
        if value:
            self.token.cancel()
        else:
            # One that was cancelled stays so, and would end all later runs.
            self.token = CancelToken()
