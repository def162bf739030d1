"""Saving behind the training."""

from __future__ import annotations

from rows import Row, checks

SAVING = "tests/checkpoint/test_save_state.py"

ROWS = [
    Row(
        "what is saved behind the training is a copy",
        "checkpoint/background.py",
        "start, target, (0, target.numel()))",
        "start, flat[done : done + target.numel()], (0, target.numel()))",
        checks("asynchronous", "holds_what_a_synchronous_one_holds", "single", "zero3"),
        "content_of(behind) == content_of(at_hand)",
    ),
    Row(
        "what a script can write to is copied at once",
        "checkpoint/background.py",
        "session.states_stay and _storage(fragment) not in held",
        "session.states_stay",
        checks("asynchronous", "what_a_script_changes_meanwhile_is_not_in_it", "single"),
        "content_of(behind) == content_of(at_hand)",
        processes=1,
    ),
    Row(
        "a step waits for the copy of what it changes",
        "loop/optimizer.py",
        "            self._await_copy()\n            if self._pre_hooks",
        "            if self._pre_hooks",
        checks("asynchronous", "what_a_script_changes_meanwhile_is_not_in_it", "single"),
        "was changed while it was copied",
        processes=1,
    ),
    Row(
        "so does what else of an optimizer's own changes it",
        "loop/optimizer.py",
        "        self._await_copy()  # the attribute may be a method that changes states\n",
        "",
        checks("asynchronous", "what_a_script_changes_meanwhile_is_not_in_it", "single"),
        "release.is_set()",
        processes=1,
    ),
    Row(
        "after load_state a window begins",
        "loop/checkpoints.py",
        "training.window.begin()",
        "training.window.restart()",
        checks("checkpoint", "back_in_the_same_run", "ddp"),
        "accelerator.sync_gradients",
    ),
    Row(
        "registered objects are copied",
        "checkpoint/background.py",
        "{stem: tree.copy() for stem, tree in opened.trees.items()}",
        "dict(opened.trees)",
        checks("asynchronous", "holds_what_a_synchronous_one_holds", "single"),
        "content_of(behind) == content_of(at_hand)",
        processes=1,
    ),
    Row(
        "a save waits for the one before",
        "loop/checkpoints.py",
        "        self._wait_for_background()\n        target = ",
        "        target = ",
        checks("asynchronous", "one_at_a_time", "single"),
        "one at a time",
        processes=1,
    ),
    Row(
        "load_state waits for a save",
        "loop/checkpoints.py",
        "        self._wait_for_background()\n        place = on_main(lambda: self._find_checkpoint(input_dir))\n",
        "        place = on_main(lambda: self._find_checkpoint(input_dir))\n",
        checks("asynchronous", "holds_what_a_synchronous_one_holds", "single"),
        "does not exist",
        processes=1,
    ),
    Row(
        "a failure behind the training is raised later",
        "checkpoint/background.py",
        "            all_or_none(future.result)\n",
        "            pass\n",
        checks("asynchronous", "a_failure_is_told_by_the_next_call", "ddp"),
        "DID NOT RAISE",
    ),
    Row(
        "host memory is asked before it is taken",
        "checkpoint/background.py",
        "        return sentence or all_or_none",
        "        return all_or_none",
        checks("asynchronous", "without_memory_it_is_not_behind", "ddp"),
        "bytes of memory on",
    ),
    Row(
        "each element is written once",
        "checkpoint/tensor_files.py",
        "        if count != math.prod(place.shape):",
        "        if False:",
        (
            f"{SAVING}::test_what_is_not_written_once_is_no_checkpoint[62]",
            f"{SAVING}::test_what_is_not_written_once_is_no_checkpoint[126]",
        ),
        "DID NOT RAISE",
        processes=0,
    ),
]
