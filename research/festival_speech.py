"""Let Festival speak sentences, with the times of their words: `python research/festival_speech.py FOLDER`.

FOLDER then has a WAV for each sentence, and `words.csv`, which `data=` of `experiment=alignment_heads` reads. Voices
are made of recorded speech: `voice_kal_diphone` joins pieces of it, `voice_cmu_us_slt_arctic_hts` is a model of it.
Needs apt install festival festvox-kallpc16k festvox-us-slt-hts, and pip install -e examples/models.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from pathlib import Path

from mhaprune_models.speech import COLUMNS, sentences

from mhaprune.storage.store import make_folder, write_bytes

PROGRAM = """
(set! said (SynthText "{text}"))
(utt.save.wave said "{file}" 'riff)
(mapcar
  (lambda (word) (format t "WORD {name} %f %f\\n" (item.feat word "word_start") (item.feat word "word_end")))
  (utt.relation.items said 'Word))
"""


def rows(folder: Path, voice: str, texts: list[str]) -> list[str]:
    """Return the lines of `words.csv`."""
    programs = [
        PROGRAM.format(text=text.strip(), file=folder / f"{number}.wav", name=number)
        for number, text in enumerate(texts)
    ]
    asked = ["festival", "--pipe"]
    done = subprocess.run(asked, input="\n".join([f"({voice})", *programs]), capture_output=True, text=True, check=True)
    words = {number: iter(text.split()) for number, text in enumerate(texts)}
    found = [",".join(COLUMNS)]
    for line in done.stdout.splitlines():
        if line.startswith("WORD "):
            _, number, start, end = line.split()
            found.append(f"{number}.wav,{next(words[int(number)])},{float(start):.3f},{float(end):.3f}")
    if left := [number for number, rest in words.items() if next(rest, None)]:
        raise SystemExit(f"voice={voice}: Festival did not say all words of sentence {left[0]}: {done.stderr.strip()}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--voice", default="voice_kal_diphone")
    parser.add_argument("--sentences", type=int, default=40)
    parser.add_argument("--draw", type=int, default=77)
    chosen = parser.parse_args()
    folder = make_folder("FOLDER", chosen.folder)
    texts = sentences(random.Random(chosen.draw))[: chosen.sentences]
    write_bytes(folder / "words.csv", "\n".join([*rows(folder, chosen.voice, texts), ""]).encode())


if __name__ == "__main__":
    main()
