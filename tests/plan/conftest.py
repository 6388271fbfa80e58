"""For property tests: how long one example takes says nothing on a machine that others use, too."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("undertow", deadline=None)
hypothesis.settings.load_profile("undertow")
