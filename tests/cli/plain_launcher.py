"""A command line that knows nothing of this package and starts itself again under torchrun, as llamafactory-cli does.

plain_launcher.py SCRIPT ARGUMENT ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy

words = ["torchrun", "--standalone", "--nproc_per_node", "2", *sys.argv[1:]]
sys.exit(subprocess.run(words, env=deepcopy(os.environ), check=False).returncode)
