"""Beats: a process touches a file while it gets on, and who watches it notices when that stops."""

import dataclasses
import os
import pathlib


@dataclasses.dataclass
class Beat:
    """The file that a process touches; its changes are timed by our own clock, as that of files may be set."""

    path: pathlib.Path
    modified: int = 0
    """Its time of modification when last seen, in nanoseconds; 0: nobody has touched it."""
    seen: float | None = None
    """When it last changed; None: never, or it is gone, by which a process says that it will beat no more."""

    @property
    def has_begun(self) -> bool:
        """Whether it was ever touched."""
        return self.modified != 0

    def reset(self) -> None:
        """Makes the file anew, for a process about to start."""
        self.path.touch(mode=0o600)
        os.utime(self.path, ns=(0, 0))
        self.modified, self.seen = 0, None

    def look(self, now: float) -> None:
        """Notes whether it was touched."""
        try:
            modified = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            self.seen = None
            return
        if modified != self.modified:
            self.modified, self.seen = modified, now
