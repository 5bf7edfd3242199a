"""Draw the embedded world: small pages from a seed, and dialogues about them that only the pages
can answer.

`train_sample(seed, index)` is the endless train split, `test_set(name)` the fixed test split of a
synthetic set, which replaces sets of the papers, `probe_set()` attribute questions whose answers
are judged by `Probe.correct`, and `tower_labels` what a vision tower should see. `python -m
picturebook OUT.png` draws a sheet of samples to look at.
"""

from __future__ import annotations

from picturebook.attributes import probe_sample
from picturebook.follow_ups import FOLLOW_UPS
from picturebook.phrases import caption
from picturebook.rendering import LABEL_CLASSES, PAGE, render, tower_labels
from picturebook.samples import IMAGE, PROBE_KINDS, Probe, Sample
from picturebook.scenes import Chart, Edit, Scene, Thing, edit, sample_chart, sample_scene
from picturebook.sets import (
    MIXTURE,
    SYNTHETIC_SETS,
    SyntheticSet,
    probe_set,
    test_set,
    train_sample,
)
