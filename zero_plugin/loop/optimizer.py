"""`AcceleratedOptimizer`: `prepare` returns one for an optimizer; it steps at the end of each accumulation window."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_plugin.distributed.collectives import announce, num_processes
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError
from zero_plugin.loop.step import apply, describe_kept_gradients, drop_if_meant, first_nonfinite
from zero_plugin.loop.window import Phase, Window
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer, has_step_hooks
from zero_plugin.strategies.precision import FoundInf

if TYPE_CHECKING:
    from zero_plugin.data.active import GradientState
    from zero_plugin.loop.scheduler import AcceleratedScheduler
    from zero_plugin.loop.state import AcceleratorState


_ENDED: Final = "this optimizer's training has ended (end_training() or free_memory() was called)"


class AcceleratedOptimizer(Optimizer):
    """A prepared optimizer: `step` applies the gradients only at the end of an accumulation window.

    The class is a subclass of `torch.optim.Optimizer`, so learning-rate schedulers can be built on it. Its parameter
    groups and states are the running optimizer's, which may be another object than the given one.

    A step whose gradients are not finite (under fp16: an overflow) is skipped with every strategy: weights, optimizer
    states and learning-rate schedulers do not change. After `session.most_skips` skips in a row the run stops.

    Args:
        optimizer: the torch optimizer. Until its model is prepared, it steps as plain torch with one process, and
            raises with several.
        device_placement: has no effect; accepted for compatibility.
        scaler: must be None; the session has the loss scale of fp16.

    Attributes:
        window: the accumulation window of its model.
        session: steps the gradients at the end of the window.
        acted: False if the last call of `step` was inside an accumulation window and did nothing.
        schedulers: the prepared schedulers of this optimizer.
        device_placement, scaler: the given arguments.

    Raises:
        LoopError: a scaler is given.
    """

    _is_accelerate_prepared = True  # Accelerate's mark; scripts look for it

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: None = None) -> None:
        # Optimizer.__init__ is not called: the running optimizer has the groups and the states.
        if scaler is not None:
            raise LoopError(
                "AcceleratedOptimizer(scaler=…) is not supported: Accelerator(mixed_precision='fp16') scales the loss."
            )
        self.device_placement, self.scaler = device_placement, scaler
        self._skipped_in_a_row = 0
        self._applied_steps = 0
        self._stepped_before = False  # whether `step` was called before the counts were loaded from a checkpoint
        self._uncounted: bool | FoundInf | None = None  # whether the last step was applied, until `settle` counts it
        self.schedulers: list[AcceleratedScheduler] = []
        self.acted = True
        self.window = Window(1)
        self.session: Session | UnpreparedOptimizer = UnpreparedOptimizer(optimizer, steps=num_processes() == 1)
        self._is_overflow = False  # the last step was skipped. Accelerate's name: tests of other libraries set it
        self._after_step: list[Callable[[], None]] = []
        # The script's hooks that the running optimizer does not call itself.
        self._pre_hooks: dict[int, Callable[..., Any]] = OrderedDict()
        self._post_hooks: dict[int, Callable[..., Any]] = OrderedDict()

    def run_in(self, window: Window, session: Session | UnpreparedOptimizer) -> None:
        """Make `step` step `session` at the end of `window`, from now on."""
        self.window, self.session = window, session
        if isinstance(session, Session):
            session.on_failure = _failing(weakref.ref(window))
            self._pre_hooks.update(session.step_hooks[0])
            self._post_hooks.update(session.step_hooks[1])

    @property
    def waits(self) -> bool:
        """Whether its model has not been prepared yet."""
        return isinstance(self.session, UnpreparedOptimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that runs."""
        if self.session.optimizer is None:
            raise LoopError(_ENDED)
        return self.session.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the running optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self._changeable("param_groups").param_groups = param_groups

    @property
    def state(self) -> Any:
        """The states of the running optimizer. Under ZeRO they belong to flat partitions: a model parameter raises."""
        states = self.optimizer.state
        return states if self.session.unpartitioned_states else _PartitionedStates(states)

    @state.setter
    def state(self, state: Any) -> None:
        self._changeable("state").state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the running optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that required gradients in `prepare`, and are in no group.

        Raises:
            LoopError: the parameters were frozen, are in a group or in no prepared model, or the optimizer is
                partitioned.
        """
        optimizer = self._changeable("add_param_group()")
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        if isinstance(self.session, Session):
            joining = set(map(id, parameters))
            left = [p for p in self.session.left_out if id(p) not in joining]
            if len(self.session.left_out) - len(left) < len(joining):
                raise LoopError(
                    "optimizer.add_param_group() got parameters that were frozen when their model was prepared, are "
                    "already in the optimizer, or are not in the model: their gradients are not averaged over the "
                    "processes.\nSet requires_grad before prepare()."
                )
            self.session.left_out = left
        optimizer.add_param_group({**param_group, "params": parameters})

    def state_dict(self) -> dict[str, Any]:
        """Return the running optimizer's state.

        Raises:
            LoopError: ZeRO has partitioned the state over processes, or the parameter groups do not hold all of it.
        """
        self._refuse_if_partitioned("state_dict()")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the running optimizer's state.

        Raises:
            LoopError: as for `state_dict`.
        """
        self._refuse_if_partitioned("load_state_dict()")
        self._await_copy()
        replacing = self.session.loading() if isinstance(self.session, Session) else nullcontext()
        with replacing:
            self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch a schedule-free optimizer to the training weights; other optimizers do nothing."""
        self._call_if_available("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to the averaged weights; other optimizers do nothing.

        Raises:
            LoopError: the optimizer steps partitions: switching would not change the weights of the model.
        """
        self._call_if_available("eval", changes_weights=True)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients if the accumulation window ends here; otherwise do nothing.

        Raises:
            LoopError: a closure is given, or the calls do not match `gradient_accumulation_steps`.
        """
        if closure is not None:
            raise LoopError("optimizer.step(closure) is not supported: gradients come from accelerator.backward(loss).")
        window, session = self.window, self.session
        if session.optimizer is None:
            raise LoopError(_ENDED)
        if self._uncounted is not None:
            self.settle()  # the previous step: the counts below must include it
        kept = None
        if window.keeps_gradients is not False and isinstance(session, Session):
            kept = describe_kept_gradients(window)
        self.acted = window.count_step(has_stepped=self._applied_steps > 0)
        if not self.acted:
            return
        if kept is not None and once(self, kept):
            announce(f"{kept}. Call optimizer.zero_grad() after each step().")
        # If a skip here stops the run, its message names the parameter: find it before the step clears the gradients.
        last_chance = self._skipped_in_a_row + 1 == session.most_skips
        try:
            culprit = first_nonfinite(window, session) if last_chance else None
            if session.before_change is not None:
                session.before_change()
            if self._pre_hooks and not session.unpartitioned_gradients and once(self, "step_pre_hook"):
                announce(
                    "a step_pre_hook runs before ZeRO has reduced the gradients: p.grad in the optimizer's groups is "
                    "None, or holds only this process's gradient. To change gradients, call p.register_hook(lambda "
                    "gradient: …) before the forward."
                )
            for hook in tuple(self._pre_hooks.values()):
                if hook(self, (), {}) is not None:
                    raise LoopError("a step_pre_hook returned arguments for step(), but step() takes none.")
        except BaseException:
            window.enter(Phase.FAILED)
            raise
        self._uncounted = apply(window, session)
        if isinstance(self._uncounted, FoundInf) and not (last_chance or self._after_step):
            return  # `settle` reads the result later: reading now would wait for the device
        self.settle(culprit)
        if self._is_overflow:
            return
        for hook in tuple(self._post_hooks.values()):
            hook(self, (), {})
        for call in self._after_step:
            call()

    @property
    def gradient_state(self) -> GradientState:
        """The accumulation state of the newest `Accelerator`."""
        from zero_plugin.data.active import GradientState

        return GradientState()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the newest `Accelerator`; raises a LoopError if none exists."""
        from zero_plugin.loop.state import AcceleratorState

        return AcceleratorState()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` at the end of a window was skipped because gradients were not finite."""
        self.settle()
        return self._is_overflow

    @property
    def skipped_in_a_row(self) -> int:
        """The number of steps that were skipped since the last applied one."""
        self.settle()
        return self._skipped_in_a_row

    @property
    def applied_steps(self) -> int:
        """The number of applied steps."""
        self.settle()
        return self._applied_steps

    @property
    def was_stepped(self) -> bool:
        """Whether `step` was called, even if only inside a window. Nothing is read from the device."""
        counted = self._applied_steps + self._skipped_in_a_row > 0
        return counted or not self.acted or self._uncounted is not None or self._stepped_before

    def restore_counts(self, applied_steps: int, skipped_in_a_row: int) -> None:
        """Continue the counts from the numbers of a checkpoint."""
        self.settle()
        self._stepped_before = self.was_stepped
        self._applied_steps, self._skipped_in_a_row = applied_steps, skipped_in_a_row

    def settle(self, culprit: str | None = None) -> None:
        """Count the last step as applied or skipped, if not done yet; `culprit` is the parameter that overflowed."""
        if (applied := self._uncounted) is None:
            return
        self._uncounted = None
        self._is_overflow = applied.read() if isinstance(applied, FoundInf) else not applied
        if self._is_overflow:
            self._count_skip(culprit)
            return
        self._skipped_in_a_row = 0
        self._applied_steps += 1

    @property
    def loss_scale(self) -> float:
        """The factor on the loss under fp16; 1.0 otherwise."""
        return self.session.loss_scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: `torch.amp.GradScaler.step` reads this first, and then divides `p.grad` by its scale itself.

        Raises:
            LoopError: gradients are partitioned, or the scaler would divide them in each micro-batch of a window.
        """
        if self.session.unpartitioned_gradients and self.window.ends_here:
            return False
        where = "inside an accumulation window" if self.session.unpartitioned_gradients else "under ZeRO"
        raise LoopError(
            f"GradScaler.step(optimizer) {where}: the script's own scaler cannot divide these gradients.\n"
            "Remove the scaler, and write mixed_precision: fp16 (or Accelerator(mixed_precision='fp16')), which scales "
            "the loss with every strategy: accelerator.backward(loss), optimizer.step()."
        )

    def zero_grad(self, set_to_none: bool | None = True) -> None:  # noqa: ARG002 - torch's signature
        """Drop the gradients if called between a backward and its step, or after a failed backward.

        At other times nothing is dropped: `step` clears the gradients, and inside a window they accumulate.

        Args:
            set_to_none: accepted for compatibility; gradients are always set to None.
        """
        drop_if_meant(self.window, self.session)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` before each step at the end of a window, as torch's method does.

        If the strategy steps partitions one after another, the hook is called once, before all of them.
        """
        return self._register(hook, self._pre_hooks, "register_step_pre_hook")

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` after each applied step, as torch's method does; under ZeRO once."""
        return self._register(hook, self._post_hooks, "register_step_post_hook")

    def _register(self, hook: Callable[..., Any], hooks: dict[int, Any], method: str) -> RemovableHandle:
        if self.session.unpartitioned_gradients and has_step_hooks(self.optimizer):
            handle: RemovableHandle = getattr(self.optimizer, method)(hook)
            return handle
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def call_after_step(self, call: Callable[[], None]) -> None:
        """Call `call` after every applied step."""
        self._after_step.append(call)

    def stop_calling(self, call: Callable[[], None]) -> None:
        """Undo `call_after_step`."""
        self._after_step.remove(call)

    def _count_skip(self, culprit: str | None) -> None:
        self._skipped_in_a_row += 1
        # Under fp16 skipped steps are expected while the loss scale is adjusted.
        if self.session.loss_scale == 1.0 and once(self, "skips"):
            announce(
                f"the step after {self._applied_steps} applied ones was skipped, because its gradients are not finite; "
                f"the weights are unchanged. After {self.session.most_skips} skipped steps in a row the run stops."
            )
        if self._skipped_in_a_row >= self.session.most_skips:
            named = f"the first is the gradient of {culprit}" if culprit else "the parameter is unknown"
            raise LoopError(
                f"{self._skipped_in_a_row} steps in a row were skipped, after {self._applied_steps} applied ones: "
                f"their gradients are not finite; {named}. The loss scale is {self.session.loss_scale:g}.\n"
                "Look at that layer's inputs and at the loss (a division by 0, log(0), an empty batch), or lower the "
                "learning rate; torch.autograd.set_detect_anomaly(True) finds the operation."
            )

    def _changeable(self, what: str) -> Optimizer:
        if not self.session.unpartitioned_gradients:
            raise LoopError(
                f"optimizer.{what}: ZeRO has partitioned the optimizer in prepare(), and it cannot be changed later.\n"
                "Build all its groups before prepare()."
            )
        return self.optimizer

    def _refuse_if_partitioned(self, call: str) -> None:
        if self.session.states_are:
            raise LoopError(
                f"optimizer.{call}: the states of this optimizer are {self.session.states_are}; no process has the "
                "complete state.\nCall accelerator.save_state(folder) and load_state(folder) on every process. "
                "Load a state of plain PyTorch before prepare()."
            )

    def _await_copy(self) -> None:
        if self.session.before_change is not None:
            self.session.before_change()

    def _call_if_available(self, name: str, *, changes_weights: bool = False) -> None:
        self._await_copy()
        optimizer: Any = self.optimizer
        while optimizer is not None:  # other libraries' wrappers also hold the inner optimizer as `.optimizer`
            if callable(method := getattr(optimizer, name, None)):
                if changes_weights and not self.session.unpartitioned_states:
                    raise LoopError(
                        f"optimizer.{name}() of a {type(optimizer).__name__} under ZeRO: it would change the "
                        "partitions of the optimizer only, and the model would be evaluated with the training weights."
                        "\nTrain without ZeRO (DDP), or with an optimizer that has one kind of weights."
                    )
                method()
                return
            optimizer = getattr(optimizer, "optimizer", None)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.session.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        # Forward attributes of the running optimizer, such as methods of a third-party class.
        if name.startswith("_") or name == "window":
            raise AttributeError(name)
        self._await_copy()  # the attribute may be a method that changes states
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is an optimizer without a prepared model, on copies of the parameters.
        if not self.session.unpartitioned_gradients:
            raise LoopError(
                "an optimizer that ZeRO has partitioned cannot be pickled; save with accelerator.save_state()"
            )
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"])  # type: ignore[misc]


def _failing(reference: weakref.ref[Window]) -> Callable[[], None]:
    """Return the callback for a gradient that is computed outside a session's backward; it keeps no window alive."""

    def fail() -> None:
        if (window := reference()) is not None:
            window.enter(Phase.FAILED)

    return fail


class _PartitionedStates(MutableMapping[Any, Any]):
    """The states of flat partitions. A model parameter as key raises; torch would create an empty state."""

    def __init__(self, states: MutableMapping[Any, Any]) -> None:
        self._states = states

    def __getitem__(self, key: Any) -> Any:
        return self._states[self._known(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states[self._known(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._states[self._known(key)]

    def __contains__(self, key: object) -> bool:
        return self._known(key) in self._states

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def _known(self, key: Any) -> Any:
        if isinstance(key, Tensor) and key not in self._states:
            raise LoopError(
                "optimizer.state[parameter] under ZeRO: states belong to flat partitions, not to parameters.\n"
                "Call deepspeed.utils.safe_get_full_optimizer_state(parameter, name) on every process, or save_state()."
            )
        return key
