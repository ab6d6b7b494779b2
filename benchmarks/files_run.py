"""Which files of the package run: what a reader follows through.

    python benchmarks/files_run.py

Counts the files, and their lines, in which a function is called by `mola.fit` and a call of the posterior, and by each command on
the embedded digits. Importing a file does not count; running something in it does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = """
import torch, mola
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(90, 4), torch.arange(90) % 3
networks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
def work():
    mola.fit(networks, [(x[:60], y[:60])], [(x[60:], y[60:])], progress=False)(x[:5])
"""
COMMAND = """
import sys
from mola.__main__ import main
sys.argv = {argv!r}
def work():
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
"""
COUNT = """
import sys, threading, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import mola
package = str(Path(mola.__file__).parent)
seen = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(package):
        seen.add(frame.f_code.co_filename)
sys.setprofile(note); threading.setprofile(note)
try:
    work()
finally:
    sys.setprofile(None)
    lines = sum(len(Path(name).read_text().splitlines()) for name in seen)
    print("FILES", len(seen), lines, *sorted(str(Path(name).relative_to(package)) for name in seen))
"""


def count(program: str, folder: Path) -> tuple[int, int, list[str]]:
    """Files and lines that a program runs through."""
    done = subprocess.run([sys.executable, "-c", program + COUNT], cwd=folder, capture_output=True, text=True)
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("FILES ")]
    if not found or done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return int(found[0][1]), int(found[0][2]), found[0][3:]


def main() -> None:
    """Print a line for each piece of work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = ["bench", "digits", "--train", "--runs", "1", "--components", "2", "--networks", "nets"]
        nets = ["nets/00.safetensors", "nets/01.safetensors", "--network", "mlp"]
        commands = {
            "mola bench digits": [*bench, "--results", "results", "--cache", "cache"],
            "mola report": ["report", "--results", "results", "--output", "report"],
            "mola fit": ["fit", *nets, "--train", "digits:train", "--val", "digits:val", "--output", "posterior"],
            "mola evaluate": ["evaluate", "posterior", "--test", "digits:test", "--output", "evaluated"],
            "mola predict": ["predict", "posterior", "digits:test", "--output", "predictions.csv"],
            "mola info": ["info", "posterior"],
        }
        work = {"fit and a call": LIBRARY} | {
            what: COMMAND.format(argv=["mola", *words]) for what, words in commands.items()
        }
        for what, program in work.items():
            files, lines, names = count(program, folder)
            print(f"{what:<20}{files:>5} files{lines:>8} lines")
            if "-v" in sys.argv:
                print("   ", *names)


if __name__ == "__main__":
    main()
