"""Threads that stand for the processes of a site find out something together."""

import collections
import threading


class SharedTalk:
    """What the threads of a site have said.

    Args:
        count: number of threads.
    """

    def __init__(self, count):
        self.count, self.said = count, collections.defaultdict(dict)
        self.changed = threading.Condition()


class ThreadTalk:
    """A `geojax.runtime.agreement.Talk` of one thread.

    Args:
        own: index of the thread.
        shared: of all threads of the site.
    """

    def __init__(self, own, shared):
        self._own, self._shared = own, shared
        self._calls = collections.Counter()

    def told_by_first(self, name, ask, timeout_seconds):
        """Return what thread 0 gets by `ask`, or raise its error."""
        said = self._next(name)
        if self._own == 0:
            try:
                self._say(said, ask())
            except Exception as error:
                self._say(said, error)
        answer = self._wait_for(said, {0}, timeout_seconds)[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def values_at_first(self, name, own_value, timeout_seconds):
        """Return the values of all threads in the first, and nothing in the others."""
        said, everyone = self._next(name), range(self._shared.count)
        self._say(said, own_value)
        values = self._wait_for(said, set(everyone), timeout_seconds)
        return [values[each] for each in everyone] if self._own == 0 else []

    def _next(self, name):
        self._calls[name] += 1
        return self._shared.said[name, self._calls[name]]

    def _say(self, said, value):
        with self._shared.changed:
            said[self._own] = value
            self._shared.changed.notify_all()

    def _wait_for(self, said, threads, timeout_seconds):
        with self._shared.changed:
            assert self._shared.changed.wait_for(lambda: threads <= set(said), timeout_seconds)
        return said
