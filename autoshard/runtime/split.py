import contextlib


class Queue:
    @contextlib.contextmanager
    def open(self):
        yield

    def run(self):
        pass
