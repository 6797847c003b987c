"""The web as tools: a search at the provider of the operator's choice, and pages read as text.

What the server makes of the two (items, numbers of sources, citations) is not known here: both take and
return JSON, and are no functions that a model is shown.
"""

from __future__ import annotations

from tools.web.folder import read_folder
from tools.web.mcp_search import McpSearch, read_name
from tools.web.pages import MAX_PAGE, prepare_pages, reads_html
from tools.web.providers import PROVIDERS, Provider
from tools.web.search import SearchFailed, WebSearch, search_once
from tools.web.specs import PAGE, SEARCH, folder_tools, web_tools
from tools.web.urls import host_of, is_within, urls_in

__all__ = [
    "MAX_PAGE",
    "PAGE",
    "PROVIDERS",
    "SEARCH",
    "McpSearch",
    "Provider",
    "SearchFailed",
    "WebSearch",
    "folder_tools",
    "host_of",
    "is_within",
    "prepare_pages",
    "read_folder",
    "read_name",
    "reads_html",
    "search_once",
    "urls_in",
    "web_tools",
]
