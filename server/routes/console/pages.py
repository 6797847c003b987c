"""GET / and /console/...: the console's page and the files that it loads.

They are open to all, as they hold nothing of the server's; what they show, they ask by the API with the
key of whoever uses them. The setting `console` takes them away.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from server.access import OPEN
from server.console import Asset, assets
from server.routes.documented import needs

router = APIRouter(include_in_schema=False)


@router.head("/", **needs(OPEN))
@router.get("/", **needs(OPEN))
async def get_page(request: Request) -> Response:
    """The one page; which view it shows stands behind the `#` of its address, and never comes here."""
    return _reply(request, assets()["index.html"])


@router.head("/console/{path:path}", **needs(OPEN))
@router.get("/console/{path:path}", **needs(OPEN))
async def get_asset(request: Request, path: str) -> Response:
    """One file. Its path is looked up among those that there are, so that none leads out of the folder."""
    asset = assets().get(path)
    if asset is None:
        raise HTTPException(404)
    return _reply(request, asset)


def _reply(request: Request, asset: Asset) -> Response:
    accepts = request.headers.get("accept-encoding", "")
    headers = asset.headers(accepts)
    if asset.is_known(request.headers.get("if-none-match", "")):
        return Response(
            status_code=304, headers={k: v for k, v in headers.items() if k != "content-encoding"}
        )
    content = asset.content(accepts)
    if request.method == "HEAD":
        return Response(headers={**headers, "content-length": str(len(content))}, media_type=asset.media_type)
    return Response(content, headers=headers, media_type=asset.media_type)
