"""What a script calls for a model's weights: unwrapping, collecting, saving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.big_models.align import stored_values
from zero_plugin.checkpoint.objects import write_object
from zero_plugin.checkpoint.save_model import (
    SavedWeights,
    adapter_names,
    has_adapters,
    names_to_save,
    parse_dtype,
    weights_of_module,
    weights_of_session,
    whole_tensors,
    write_configuration,
    write_model,
)
from zero_plugin.config.amounts import require_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.resolve.run_record import describe_run, write_record
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.processes import Processes
from zero_plugin.distributed.together import all_or_none, on_main
from zero_plugin.errors import LoopError
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import persistent_tensors, shared_names
from zero_plugin.tensors.nested import list_leaves
from zero_plugin.tensors.wrappers import bare_copy, extract_model


class WeightCalls:
    """The calls of the facade that concern a model's weights."""

    document: Document
    _processes: Processes
    _trainings: list[Training]
    _say: Callable[[str], None]

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared model.

        Args:
            model: prepared, or wrapped by the user.
            keep_fp32_wrapper: leave its forward under autocast; else a prepared model's copy with the same weights is
                given, which has the class' own and can be pickled, and the prepared one trains on.
            keep_torch_compile: of a model that the user compiled, give the compiled one.
        """
        session = self._session_of(model)
        if session is None:
            return extract_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
        module = extract_model(session.module, keep_torch_compile=keep_torch_compile)
        return module if keep_fp32_wrapper else bare_copy(module)

    @collective("get_state_dict", meets=True)
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor] | None:
        """Whole weights and buffers in host memory, in the type they are trained in; collective.

        Of a model with PEFT adapters, only the adapters' and what else is trained: the frozen base is not gathered.

        Args:
            model: prepared, or not.
            unwrap: False gives the names that the prepared model has, with `module.` before them where it is wrapped.

        Returns:
            The dict on the main process, None on the others, whatever the strategy.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors(model):
            if self._processes.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        if self._processes.rank != 0:
            return None
        state |= {alias: state[name] for alias, name in self._shared_names(model).items() if name in state}
        session = self._session_of(model)
        wrapped = session is not None and session.model is not session.module
        return state if unwrap or not wrapped else {f"module.{name}": tensor for name, tensor in state.items()}

    @collective("save_model", meets=True)
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        trainable_only: bool = False,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        """Write the weights as a Hugging Face-style folder of safetensors; collective: each process writes its part.

        A transformers model's folder loads with `from_pretrained`; of a model with PEFT adapters only they are written,
        in PEFT's own layout. Beside them, `resolved_config.json` says how the model was trained: every value and where
        it came from. An error leaves a model that was in the folder as it was.

        Args:
            model: prepared, or not.
            save_directory: made if it is missing.
            max_shard_size: largest size of one file, e.g. `5GB`.
            safe_serialization: only True.
            trainable_only: write the parameters with `requires_grad` alone, without configuration files; they load over
                the model that they were trained from: `load_weights(model, folder, strict=False)`.
            dtype: of floating-point parameters in the files: `fp32`, `bf16`, `fp16` or torch's own. They are converted
                from the optimizer's copies, so `fp32` gives the masters of 16-bit weights exactly. Absent, it is the
                type that each is trained in. Buffers keep theirs.

        Raises:
            LoopError: pickles are asked for; the model is partitioned and was not prepared; a tensor has no elements;
                or there is none to write.
            CheckpointError: a process cannot write, or `dtype` needs masters that cannot be reached.
            ConfigError: `max_shard_size` or `dtype` is none.
        """
        if not safe_serialization:
            raise LoopError(
                "save_model(safe_serialization=False): weights are written as safetensors, which need no pickle.\n"
                "Leave it out, or write accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin')."
            )
        limit, stored_as = require_bytes("save_model(max_shard_size=…)", max_shard_size), parse_dtype(dtype)
        target = Path(save_directory).expanduser().absolute()
        module = self.unwrap_model(model)
        adapters = self._saved_names(module)
        names = names_to_save(module, trainable_only=trainable_only) if adapters is None else adapters
        weights = self._saved_weights(model, names, stored_as)
        if adapters is not None:
            self._write_adapters(model, whole_tensors(weights), target)
            return

        def write_more(folder: Path) -> None:
            self._write_record(model, folder)
            if not trainable_only:
                write_configuration(module, folder, stored_as)

        write_model(
            weights,
            target,
            max_shard_bytes=limit,
            tied=self._shared_names(model),
            notes={"contains": "the parameters that were trained"} if trainable_only else {},
            write_more=write_more,
            say=self._say,
        )

    def _saved_weights(self, model: nn.Module, names: Collection[str], dtype: torch.dtype | None) -> SavedWeights:
        session = self._session_of(model)
        if session is not None:
            return weights_of_session(session, names, dtype)

        def tensors() -> Iterable[tuple[str, Tensor]]:
            own = self._own_tensors(model, names)
            return own if self._processes.rank == 0 else ()

        return all_or_none(lambda: weights_of_module(self.unwrap_model(model), tensors, dtype))

    def _write_adapters(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        def write() -> None:
            module: Any = self.unwrap_model(model)
            module.save_pretrained(folder, state_dict=state)
            self._write_record(model, folder)

        on_main(write)

    def _write_record(self, model: nn.Module, folder: Path) -> None:
        for training in self._trainings:
            if training.is_of_model(model):
                write_record(describe_run(self.document, training.resolved, training.facts), folder)

    @collective("whole_weights", meets=True)
    def _enter_whole(self, stack: ExitStack, models: tuple[nn.Module, ...]) -> None:
        for model in models:
            session = self._session_of(model)
            if session is None:
                raise LoopError(f"whole_weights() got a {type(model).__name__} that is not prepared.")
            stack.enter_context(session.whole_weights())

    @contextmanager
    def whole_weights(self, *models: nn.Module) -> Iterator[None]:
        """Inside, the weights of prepared models can be read and written as in plain torch; collective.

        For averages of weights (EMA, a mean teacher), weights that are clipped, `load_state_dict` between steps. Under
        ZeRO the optimizer goes on from what was written; at stage 3 parameters are whole inside, on every process, and
        what process 0 wrote stays. Every process has to write the same.

        Args:
            *models: prepared ones.

        Raises:
            LoopError: a model is not prepared, or its weights lie on NVMe.
        """
        with ExitStack() as stack:
            self._enter_whole(stack, models)
            yield

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """`torch.save` on the main process only.

        Args:
            obj: what to save.
            f: path, or file opened for writing.
            safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`; each shared one once.

        Raises:
            LoopError: a tensor is partitioned, so that no process has it.
        """
        if any(hasattr(leaf, "ds_id") and leaf.numel() != leaf.ds_numel for leaf in list_leaves(obj)):
            raise LoopError(
                "save() got parameters that ZeRO stage 3 has partitioned: no process has them.\n"
                "Write accelerator.save(accelerator.get_state_dict(model), …), or use save_model()."
            )
        if self._processes.rank == 0:
            write_object(obj, f, safe_serialization=safe_serialization)

    def _named_tensors(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        session = self._session_of(model)
        if session is not None:
            return session.named_tensors(self._saved_names(session.module))
        return self._own_tensors(model, self._saved_names(self.unwrap_model(model)))

    def _own_tensors(self, model: nn.Module, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Those of a model that is not prepared."""
        module = self.unwrap_model(model)
        if any(hasattr(p, "ds_id") for p in module.parameters()):
            raise LoopError(
                f"the {type(module).__name__} is partitioned, and not prepared; pass the model that prepare() returned."
            )
        return stored_values(module, persistent_tensors(module, names))

    def _saved_names(self, module: nn.Module) -> Collection[str] | None:
        """The tensors of a model that are saved, as the main process sees it; None for all."""
        if not has_adapters(module):
            return None
        names: list[Any] = [adapter_names(module) if self._processes.rank == 0 else None]
        collectives.broadcast_object_list(names)
        saved: Collection[str] = names[0]
        return saved

    def _shared_names(self, model: nn.Module) -> dict[str, str]:
        return shared_names(self.unwrap_model(model))

    def _session_of(self, model: nn.Module) -> Session | None:
        return next((training.session for training in self._trainings if training.is_of_model(model)), None)
