"""Plugin of ms-swift that adds a callback. swift_train.py trains with it.

The options: `--external_plugins swift_plugin.py --callbacks flce`.
"""

from __future__ import annotations

from swift.callbacks import callbacks_map

from flce.huggingface import FlceCallback

callbacks_map["flce"] = lambda args, trainer: FlceCallback()
