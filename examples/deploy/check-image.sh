#!/bin/sh
# Builds the image for a CPU, starts a server in it and asks it for a response: with neither a container daemon nor a
# registry, since the base is made of Debian's packages. As root on Debian, from the root of the repository:
#
#   apt-get install buildah debootstrap
#   examples/deploy/check-image.sh
#
# Arguments are passed on to `buildah bud`, such as --volume /etc/ssl/certs:/etc/ssl/certs:ro where a proxy has a
# certificate of its own. SUITE and MIRROR say where the packages come from. WORK is a folder that is kept, with the
# base and the image in it; without it there is none afterwards.
set -eu

suite=${SUITE:-bookworm} mirror=${MIRROR:-http://deb.debian.org/debian} work=${WORK:-$(mktemp -d)}
base=$(sed -n 's/^ARG BASE=//p' examples/deploy/Dockerfile)
export BUILDAH_ISOLATION=chroot

b() { buildah --root "$work/storage" --runroot "$work/run" "$@"; }

end() {
    b rm --all >/dev/null
    [ -n "${WORK:-}" ] || { b rmi --all --force >/dev/null; rm -rf "$work"; }
}
trap end EXIT

[ -e "$work/base" ] || debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$work/base" "$mirror"
container=$(b from scratch)
b add --quiet "$container" "$work/base" / >/dev/null
b commit --quiet --rm "$container" "$base" >/dev/null

b bud --format docker --pull-never --file examples/deploy/Dockerfile \
    --ignorefile examples/deploy/Dockerfile.dockerignore --target cpu --tag antiphon "$@" .

b run --env ANTIPHON_API_KEY=sk-check "$(b from --pull-never antiphon)" -- python3 -c '
import json, os, subprocess, urllib.request

command = ["antiphon", "serve", "--host", "127.0.0.1", "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
url = server.stdout.readline().split("listens on ")[1].split()[0]
headers = {"authorization": "Bearer sk-check", "content-type": "application/json"}

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url + path, data, headers)))

print("user", os.getuid(), ask("/ready"))
print(ask("/v1/responses", {"input": "My name is Mark."})["output"][0]["content"][0]["text"])
server.terminate()
print("exit code", code := server.wait(60))
raise SystemExit(code)
'
