"""A phase of a folder alone: notes are kept, progress is not drawn."""

import contextlib


class FakePhase:
    def __init__(self, folder):
        self.folder, self.notes = folder, []

    def of(self, name):
        return self.folder

    def note(self, text):
        self.notes.append(text)

    def log_file(self, name):
        return self.folder / f"{name}.log"

    @contextlib.contextmanager
    def progress(self, *_):
        class Bar:
            def update(self, count):
                pass

        yield Bar()
