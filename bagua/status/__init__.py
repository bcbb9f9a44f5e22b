"""What a running job tells an observer such as `bagua top`: ranks answer their launcher, launchers answer observers.

Nobody is told anything unasked. A question costs a rank one thread switch and a small JSON text.
"""

from __future__ import annotations
