#!/usr/bin/env bash
# Installs bubblewrap, the default sandbox, where this user may: as root, or with sudo that asks for no password.
# Otherwise prints the one command that a person has to run, and exits with 1.
set -euo pipefail

if command -v bwrap >/dev/null; then
  exit 0
fi

if command -v apt-get >/dev/null; then
  # The package lists of a fresh image are empty; where they are merely old, the first attempt saves refreshing them.
  install="apt-get install -y --no-install-recommends bubblewrap || { apt-get update && apt-get install -y --no-install-recommends bubblewrap; }"
elif command -v dnf >/dev/null; then
  install="dnf install -y bubblewrap"
elif command -v zypper >/dev/null; then
  install="zypper --non-interactive install bubblewrap"
elif command -v pacman >/dev/null; then
  install="pacman -Sy --noconfirm bubblewrap"
elif command -v apk >/dev/null; then
  install="apk add bubblewrap"
else
  echo "postrl needs bubblewrap (the program bwrap) and found no package manager that it knows." >&2
  echo "Install it by hand, then run make again. Nothing that a policy writes runs outside a sandbox." >&2
  exit 1
fi

if [ "$(id -u)" = 0 ]; then
  as_root=(env DEBIAN_FRONTEND=noninteractive)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n env DEBIAN_FRONTEND=noninteractive)
else
  echo "postrl needs bubblewrap, and only root may install it. Run this, then make again:" >&2
  echo >&2
  echo "    sudo sh -c '$install'" >&2
  exit 1
fi

echo "installing bubblewrap, the sandbox"
"${as_root[@]}" sh -c "$install" >/dev/null
command -v bwrap >/dev/null || { echo "bubblewrap was installed, but bwrap is not on PATH ($PATH)" >&2; exit 1; }
