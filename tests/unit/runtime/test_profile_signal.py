import os
import signal

from geojax.runtime import ProfileSignal


def test_a_signal_asks_once():
    with ProfileSignal() as asked:
        assert not asked.take()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.take()
        assert not asked.take()


def test_the_handler_from_before_comes_back():
    before = signal.getsignal(signal.SIGUSR1)
    with ProfileSignal():
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
