"""The front: nginx, which is all that nodes and strangers reach. Its file is generated here.

It passes the ten requests that a SuperNode makes, for a certificate that is enrolled and with the Flower key that belongs to it; and one
path of our own, on which nodes enrol. All else is closed without an answer. The SuperLink behind it listens on loopback only.
"""

from __future__ import annotations

import base64
import grp
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polyfed.deploy.private_files import private_folder, write_private
from polyfed.deploy.registry import NodeRecord
from polyfed.errors import MissingExtra, SettingError

ENROL_PATH = "/polyfed/enrol"
FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""What a SuperNode with a registered key asks for. It need not register or unregister itself, so it may not."""
SECRET_HEADER, ADDRESS_HEADER, SERIAL_HEADER = "X-Polyfed-Front", "X-Polyfed-Address", "X-Polyfed-Serial"
LARGEST_OBJECT, LARGEST_ENROLMENT = "64m", "16k"
PROGRAM = "nginx"
NEWLINE = "\n"
UNUSABLE = set("\"'$;{}\\@") | {NEWLINE}
PLACES = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"


@dataclass(frozen=True)
class Front:
    """Where the front listens, what it stands in front of, and its files.

    Attributes:
        folder: of its own files.
        listen: address to listen on, such as 0.0.0.0.
        port: to listen on.
        link: port of the SuperLink on loopback.
        enrolment: port of the enrolment service on loopback.
        secret: by which those two know the front.
        certificates: folder with the server's certificate, its key and the authority's certificate.
        link_authority: the authority that signed the SuperLink's own certificate.
    """

    folder: Path
    listen: str
    port: int
    link: int
    enrolment: int
    secret: str
    certificates: Path
    link_authority: Path

    @property
    def file(self) -> Path:
        """Nginx's file."""
        return self.folder / "nginx.conf"

    @property
    def access_log(self) -> Path:
        """Where nginx writes every request."""
        return self.folder / "access.log"

    def write(self, nodes: Iterable[NodeRecord]) -> bool:
        """Write nginx's file for the nodes that may come in; says whether it changed."""
        private_folder(self.folder)
        text = self.text(nodes)
        if self.file.exists() and self.file.read_text() == text:
            return False
        write_private(self.file, text)
        return True

    def command(self) -> list[str]:
        """How nginx is started, in the foreground."""
        return [nginx(), "-c", str(self.file), "-p", str(self.folder), "-e", str(self.folder / "error.log")]

    def check(self) -> None:
        """Let nginx read the file before it is used."""
        done = subprocess.run([*self.command(), "-t", "-q"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SettingError(f"nginx refuses the file that was generated for it: {' '.join(done.stderr.split())}")

    def text(self, nodes: Iterable[NodeRecord]) -> str:
        """Nginx's file."""
        allowed = "\n".join(
            f'        "{serial} {base64.b64encode(node.key.encode()).decode()}" "{node.name}";'
            for node in nodes
            for serial in node.serials
        )
        listen = f"[{self.listen}]" if ":" in self.listen else self.listen
        values = {
            "USER": worker_user(),
            "FOLDER": str(self.folder),
            "CERTIFICATES": str(self.certificates),
            "LINK_AUTHORITY": str(self.link_authority),
            "LISTEN": f"{listen}:{self.port}",
            "LINK": str(self.link),
            "ENROLMENT": str(self.enrolment),
            "SECRET_HEADER": SECRET_HEADER,
            "SECRET": self.secret,
            "ADDRESS_HEADER": ADDRESS_HEADER,
            "SERIAL_HEADER": SERIAL_HEADER,
            "ENROL_PATH": ENROL_PATH,
            "FLEET": "|".join(FLEET),
            "LARGEST_OBJECT": LARGEST_OBJECT,
            "LARGEST_ENROLMENT": LARGEST_ENROLMENT,
            "ALLOWED": allowed,
        }
        text = TEXT
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text

    def __post_init__(self) -> None:
        for path in (self.folder, self.certificates, self.link_authority):
            if set(str(path)) & UNUSABLE:
                raise SettingError(
                    f"nginx cannot use the folder {path}: its path has one of {' '.join(sorted(UNUSABLE - {NEWLINE}))}."
                )


def worker_user() -> str:
    """The account of nginx's workers, which talk to the network: never root. Other accounts cannot change it."""
    if os.getuid() != 0:
        return "# its workers have the account of who started it"
    nobody = pwd.getpwnam("nobody")
    return f"user nobody {grp.getgrgid(nobody.pw_gid).gr_name}"


def nginx() -> str:
    """Where nginx is."""
    found = shutil.which(PROGRAM, path=PLACES)
    if found is None:
        raise MissingExtra(
            "polyfed serve needs nginx in front of the SuperLink. Install it (Debian, Ubuntu: apt install nginx-light)."
        )
    return found


def reload(process: int) -> None:
    """Let nginx read its file again; connections that are open end with their request."""
    os.kill(process, signal.SIGHUP)


TEXT = """\
# Written by polyfed serve, and written again when nodes come and go.
@USER@;
daemon off;
worker_processes 2;
worker_shutdown_timeout 60s;
pid "@FOLDER@/nginx.pid";
error_log "@FOLDER@/error.log" warn;

events {
    worker_connections 1024;
}

http {
    log_format attempts escape=json
        '{"time":"$time_iso8601","address":"$remote_addr","request":"$request_method","path":"$request_uri","status":$status,'
        '"certificate":"$ssl_client_verify","serial":"$ssl_client_serial","subject":"$ssl_client_s_dn","node":"$node",'
        '"bytes_in":$request_length,"bytes_out":$bytes_sent,"tls":"$ssl_protocol"}';
    access_log "@FOLDER@/access.log" attempts;

    client_body_temp_path "@FOLDER@/body";
    proxy_temp_path "@FOLDER@/proxy";
    fastcgi_temp_path "@FOLDER@/fastcgi";
    uwsgi_temp_path "@FOLDER@/uwsgi";
    scgi_temp_path "@FOLDER@/scgi";

    server_tokens off;
    keepalive_timeout 75s;
    client_header_timeout 15s;
    client_body_timeout 60s;
    send_timeout 60s;
    large_client_header_buffers 4 8k;
    reset_timedout_connection on;

    # Enrolled certificates, each with the Flower key that belongs to it. Who is not here is a stranger.
    map_hash_bucket_size 2048;
    map_hash_max_size 8192;
    map "$ssl_client_serial $http_flwr_public_key" $node {
        default "";
@ALLOWED@
    }
    map $node $stranger {
        "" $binary_remote_addr;
        default "";
    }

    limit_conn_zone $binary_remote_addr zone=connections:1m;
    limit_req_zone $stranger zone=strangers:1m rate=10r/s;
    limit_req_zone $binary_remote_addr zone=enrolments:1m rate=1r/s;
    limit_req_zone $node zone=nodes:1m rate=200r/s;
    limit_req_status 429;
    limit_conn_status 429;

    upstream superlink {
        server 127.0.0.1:@LINK@;
        keepalive 16;
    }

    server {
        listen @LISTEN@ ssl;
        ssl_certificate "@CERTIFICATES@/server.crt";
        ssl_certificate_key "@CERTIFICATES@/server.key";
        ssl_client_certificate "@CERTIFICATES@/ca.crt";
        ssl_verify_client optional;
        ssl_verify_depth 1;
        ssl_protocols TLSv1.3;
        ssl_session_cache off;
        ssl_session_tickets off;

        limit_conn connections 64;
        client_max_body_size 1k;
        proxy_http_version 1.1;

        location ~ "^/v1/fleet/(@FLEET@)$" {
            if ($ssl_client_verify != SUCCESS) { rewrite ^ /stranger last; }
            if ($node = "") { rewrite ^ /stranger last; }
            if ($request_method != POST) { rewrite ^ /stranger last; }
            limit_req zone=nodes burst=2000 nodelay;
            client_max_body_size @LARGEST_OBJECT@;
            proxy_pass https://superlink/v1/fleet/$1;
            proxy_ssl_protocols TLSv1.3;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_trusted_certificate "@LINK_AUTHORITY@";
            proxy_set_header Connection "";
            proxy_set_header Host localhost;
            proxy_set_header @SECRET_HEADER@ "@SECRET@";
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_read_timeout 300s;
        }

        location = @ENROL_PATH@ {
            limit_req zone=enrolments burst=20 nodelay;
            client_max_body_size @LARGEST_ENROLMENT@;
            client_body_buffer_size @LARGEST_ENROLMENT@;
            proxy_pass http://127.0.0.1:@ENROLMENT@;
            proxy_set_header @SECRET_HEADER@ "@SECRET@";
            proxy_set_header @ADDRESS_HEADER@ $remote_addr;
            proxy_set_header @SERIAL_HEADER@ $certified;
            proxy_max_temp_file_size 0;
        }

        # Refused only after the limits were looked at: a plain return would pass them by.
        location = /stranger {
            internal;
            limit_req zone=strangers burst=20 nodelay;
            deny all;
        }

        location / {
            limit_req zone=strangers burst=20 nodelay;
            error_page 403 405 429 = @nothing;
            deny all;
        }

        location @nothing {
            return 444;
        }
    }

    # The serial counts only where the authority signed the certificate and the key was shown.
    map $ssl_client_verify $certified {
        SUCCESS $ssl_client_serial;
        default "";
    }
}
"""
