"""Values of ``key``, which locate the key in a request; new keys; and the view of a key's status."""

from .http.key_sources import FromBody, FromForm, FromHeader, FromJSON
from .http.key_status import KeyStatusView
from .identity.keys import new_key
from .public import adopt

__all__ = ["FromBody", "FromForm", "FromHeader", "FromJSON", "KeyStatusView", "new_key"]

adopt(__name__, map(globals().get, __all__))
