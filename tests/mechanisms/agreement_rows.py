"""The agreement of the processes about their collective calls, and their common end."""

from __future__ import annotations

from rows import Row

AGREEMENT = "tests/agreement/test_agreement.py"

ROWS = [
    Row(
        "a process in a different call",
        "agreement.py",
        "            elif standing.calls == self._calls and standing.call != self._call:",
        "            elif False:",
        (f"{AGREEMENT}::test_different_long_calls[ddp:long_calls]",),
        "save_model()",
        processes=1,
    ),
    Row(
        "a process that has ended",
        "agreement.py",
        "                if standing.gone:\n                    return self._left(rank, standing)\n",
        "",
        (f"{AGREEMENT}::test_a_process_that_failed[ddp:fails]",),
        "process 1 has failed",
        processes=1,
    ),
    Row(
        "a process that tells its end",
        "agreement.py",
        "    atexit.register(_tell_end)\n",
        "",
        (f"{AGREEMENT}::test_a_process_that_failed[ddp:fails]",),
        "process 1 has failed",
        processes=1,
    ),
    Row(
        "a collective call on one process alone",
        "agreement.py",
        "                if standing.issued > self._issued_before:",
        "                if False:",
        (f"{AGREEMENT}::test_a_long_call_on_one_process_is_an_error_of_the_script[ddp:save_alone-save_model]",),
        "process 0 is in",
        processes=1,
    ),
    Row(
        "long calls meet before they touch the group",
        "agreement.py",
        "        if meets:\n            try:",
        "        if False:\n            try:",
        (f"{AGREEMENT}::test_different_long_calls[ddp:long_calls]",),
        "[1, 1]",
        processes=1,
    ),
    Row(
        "a late process is no error",
        "agreement.py",
        "                late[rank] = standing\n",
        "                return self._elsewhere(rank, standing)\n",
        (f"{AGREEMENT}::test_a_late_process_is_named_and_waited_for[ddp:late]",),
        "[0, 0]",
        processes=1,
    ),
    Row(
        "a late process is named",
        "agreement.py",
        "        self._next_warning = 2 * waited\n",
        "        return\n",
        (f"{AGREEMENT}::test_a_late_process_is_named_and_waited_for[ddp:late]",),
        "has waited in",
        processes=1,
    ),
    Row(
        "a meeting ends with the group's time-out",
        "agreement.py",
        "                if time.monotonic() > deadline:",
        "                if False:",
        (f"{AGREEMENT}::test_a_meeting_ends_with_the_time_out[ddp:overdue]",),
        "time-out: process 1 is at",
        processes=1,
    ),
    Row(
        "an early end is met",
        "accelerator.py",
        '    @collective("end_training", meets=True)\n',
        "",
        (f"{AGREEMENT}::test_more_steps_on_one_process[ddp:more_steps]",),
        "[1, 1]",
        processes=1,
    ),
    Row(
        "an error on one process does not wait for the others",
        "strategies/processes.py",
        '        if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:',
        "        if True:",
        (f"{AGREEMENT}::test_a_process_that_failed[ddp:fails]",),
        "has failed",
        processes=1,
    ),
    Row(
        "a script's end is the training's",
        "accelerator.py",
        "        self._at_exit = call_at_exit(self.end_training)",
        "        self._at_exit = lambda: None",
        (f"{AGREEMENT}::test_more_steps_on_one_process[ddp:more_steps]",),
        "[1, 1]",
        processes=1,
    ),
]
