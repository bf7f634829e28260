"""Installs the patches that report calls hidden from a `TorchFunctionMode`: for one run, in one thread, under a lock.

torch's compiling and exporting states are set meanwhile: models that branch on them take the branch that needs no data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import torch

from fxopt.capture.capture_internals import IS_COMPILING, IS_EXPORTING
from fxopt.capture.patches.fake_kernels import patch_kernels
from fxopt.capture.patches.mask_loops import patch_loops
from fxopt.capture.patches.python_numbers import patch_numbers
from fxopt.capture.patches.random_numbers import patch_random_numbers
from fxopt.capture.patches.replaced import Patches
from fxopt.capture.patches.tensor_types import patch_types
from fxopt.capture.patches.torch_functions import patch_torch
from fxopt.capture.patches.transformers_masks import patch_masks
from fxopt.capture.recording.recorder import Recorder

lock = threading.RLock()
# A fork waits for the end of a capture: otherwise its child would keep torch's functions patched and the lock held.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextlib.contextmanager
def patched_torch(recorder: Recorder, model: torch.nn.Module) -> Iterator[None]:
    """Report to `recorder` the calls of this thread in the block, in which `model` runs."""
    thread = threading.get_ident()
    writer, decisions = recorder.writer, recorder.decisions

    def active() -> bool:
        return threading.get_ident() == thread and recorder.recording

    def in_forward() -> bool:
        return threading.get_ident() == thread and not recorder.below

    with Patches(active, in_forward) as patch:
        patch.set(*IS_COMPILING, True)
        patch.set(*IS_EXPORTING, True)
        # torch logs each error of an operator before raising it, but some errors only decide a condition here.
        patch.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        patch_torch(patch, recorder)
        patch_numbers(patch, decisions)
        patch_random_numbers(patch, recorder.draws, recorder.fail)
        patch_masks(patch, writer, decisions.specialised, recorder.fail)
        patch_loops(patch, writer, decisions)
        patch_types(patch, model, decisions.specialised)
        patch_kernels(patch)
        yield
