"""Sources of adapters: folders, the Hugging Face hub, object stores, plug-ins.

Everything here ends in a local folder before the engine gets the adapter: a slow store delays no other request.
"""

from .resolver import AdapterResolver
from .sources import AdapterSources, SourceOptions

__all__ = ["AdapterResolver", "AdapterSources", "SourceOptions"]
