"""Handlers of stop signals: noticed by another thread, chained, given back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.signals import StopSignals, parse_signals, stop_signals
from tests.support.chain import poll

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (USR1, USR2)}
    yield StopSignals()
    for number, handler in before.items():
        assert signal.getsignal(number) == handler
    assert signal.set_wakeup_fd(-1) == -1


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signal_is_counted_and_the_handler_before_is_called_too(signals: StopSignals) -> None:
    heard: list[int] = []
    signal.signal(USR1, lambda number, _: heard.append(number))
    try:
        give_back = signals.install([USR1])
        send(USR1)
        signals.poll()
        assert signals.count(USR1) == 1
        assert heard == [USR1]
        assert signals.is_handled_elsewhere(USR1)
        give_back()
        send(USR1)
        assert heard == [USR1, USR1]
    finally:
        signal.signal(USR1, signal.SIG_DFL)


def test_another_thread_hears_of_it_before_the_main_thread_can_handle_it(signals: StopSignals) -> None:
    give_back = signals.install([USR1])
    found: list[object] = []

    def heard() -> bool:
        signals.poll()
        return signals.count(USR1) == 1

    def look() -> None:
        send(USR1)  # which thread gets it, and when, is the kernel's business
        found.append(poll(heard, what="this thread has heard"))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    give_back()
    assert found == [True]


def test_two_managers_share_the_handler_and_the_last_gives_it_back(signals: StopSignals) -> None:
    first, second = signals.install([USR1, USR2]), signals.install([USR1])
    first()
    assert signal.getsignal(USR1) == signals._handle
    assert signal.getsignal(USR2) == signal.SIG_DFL
    second()


def test_ignored_signal_stays_ignored(signals: StopSignals) -> None:
    signal.signal(USR1, signal.SIG_IGN)
    try:
        signals.install([USR1])()
        assert signal.getsignal(USR1) == signal.SIG_IGN
    finally:
        signal.signal(USR1, signal.SIG_DFL)


def test_wakeup_descriptor_of_an_event_loop_is_left_alone(signals: StopSignals) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    try:
        give_back = signals.install([USR1])
        send(USR1)
        assert signals.count(USR1) == 1
        assert os.read(read, 10) == bytes([USR1])
        give_back()
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


def test_off_the_main_thread_nothing_is_installed(signals: StopSignals) -> None:
    thread = threading.Thread(target=lambda: signals.install([USR1])())
    thread.start()
    thread.join()
    assert signal.getsignal(USR1) == signal.SIG_DFL


def test_names_are_checked() -> None:
    assert parse_signals(None, None) == (signal.SIGTERM, signal.SIGUSR1)
    assert parse_signals(None, "") == ()
    assert parse_signals(None, "SIGUSR2, SIGTERM") == (signal.SIGUSR2, signal.SIGTERM)
    assert parse_signals((), "SIGUSR2") == ()
    for wrong in ("USR1", "SIGKILL", "15"):
        with pytest.raises(InvalidInputError):
            parse_signals([wrong], None)


def test_forked_child_dies_of_the_signal_and_the_parent_hears_nothing_of_it() -> None:
    """Case I121."""
    give_back = stop_signals.install([USR1])
    heard = stop_signals.count(USR1)
    try:
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), USR1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -USR1
        stop_signals.poll()
        assert stop_signals.count(USR1) == heard
    finally:
        give_back()
