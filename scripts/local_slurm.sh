#!/usr/bin/env bash
# A real SLURM on this machine alone, with accounting, to try launch=slurm: jobs, arrays, time-outs, requeues.
#
#   sudo scripts/local_slurm.sh start FOLDER    install it (Debian), start it, say when it is ready
#   sudo scripts/local_slurm.sh stop FOLDER     stop it
#
# FOLDER is where its state, its logs and slurm.conf lie. Then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -eq 2 ] || usage
[ "$(id -u)" -eq 0 ] || { echo "error: local_slurm.sh: must be root, to install and to start daemons" >&2; exit 1; }
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf
host=$(hostname -s)

stop() {
    for name in slurmd slurmctld slurmdbd mariadbd; do
        pkill -F "$(find "$folder" -maxdepth 2 -name "$name.pid" | grep . || echo /dev/null)" 2>/dev/null || true
    done
    [ ! -f "$folder/munged.started" ] || pkill -u munge -x munged 2>/dev/null || true
    rm -f "$folder/munged.started"
}

installed() { command -v slurmctld slurmd slurmdbd mariadbd munged sacct >/dev/null; }

configure() {
    mkdir -p "$folder"/{state,spool,database}
    cat >"$folder/slurmdbd.conf" <<EOF
AuthType=auth/munge
DbdHost=localhost
DbdPort=16819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
PidFile=$folder/slurmdbd.pid
LogFile=$folder/slurmdbd.log
EOF
    chmod 600 "$folder/slurmdbd.conf"
    cat >"$folder/slurm.conf" <<EOF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmctldPort=16817
SlurmdPort=16818
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=16819
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=5,sched_min_interval=0
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo) State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
EOF
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds
wait_for() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || { echo "error: $what did not start, see the logs in $folder" >&2; exit 1; }
        sleep 0.3
    done
}

start_database() {
    local socket=/run/mysqld/mysqld.sock
    install -d -o mysql -g mysql -m 755 /run/mysqld
    chown -R mysql "$folder/database"
    [ -d "$folder/database/mysql" ] ||
        mariadb-install-db --user=mysql --datadir="$folder/database" --auth-root-authentication-method=socket >"$folder/database.log"
    mariadbd --user=mysql --datadir="$folder/database" --socket=$socket --skip-networking \
        --pid-file="$folder/database/mariadbd.pid" >>"$folder/database.log" 2>&1 &
    wait_for 30 mariadbd mariadb-admin --socket=$socket ping
}

start() {
    if ! installed; then
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends slurm-wlm slurmdbd mariadb-server munge
    fi
    configure
    install -d -o munge -g munge -m 755 /run/munge
    pgrep -u munge -x munged >/dev/null || { runuser -u munge -- /usr/sbin/munged && touch "$folder/munged.started"; }
    start_database
    (cd "$folder" && SLURM_CONF=$SLURM_CONF slurmdbd -D >>"$folder/slurmdbd.log" 2>&1) &
    wait_for 30 slurmdbd sacctmgr -n show cluster
    sacctmgr -n show cluster local | grep -q local || sacctmgr -i add cluster local >/dev/null
    slurmctld -D -c -f "$SLURM_CONF" >>"$folder/slurmctld.log" 2>&1 &
    wait_for 30 slurmctld scontrol ping
    slurmd -D -f "$SLURM_CONF" >>"$folder/slurmd.log" 2>&1 &
    wait_for 60 slurmd sh -c 'sinfo -h -o %T | grep -q idle'
    echo "SLURM is ready: export SLURM_CONF=$SLURM_CONF"
}

case $1 in
    start) start ;;
    stop) stop ;;
    *) usage ;;
esac
