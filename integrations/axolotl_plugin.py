"""Plugin of Axolotl that patches the model. axolotl_train.py trains with it.

The line in the configuration: `plugins: [axolotl_plugin.FlcePlugin]`.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import flce


class FlcePlugin(BasePlugin):
    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the model. Axolotl calls this method after it has added adapters."""
        flce.patch_model(model)
