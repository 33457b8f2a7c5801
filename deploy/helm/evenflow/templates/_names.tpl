{{- define "evenflow.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{/* Of [root, component]. */}}
{{- define "evenflow.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "evenflow.labels" -}}
{{- $root := index . 0 -}}
{{ include "evenflow.selector" . }}
app.kubernetes.io/version: {{ $root.Values.image.tag | default $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* Of [root, name]. */}}
{{- define "evenflow.image" -}}
{{- $root := index . 0 -}}
{{ $root.Values.image.registry }}evenflow-{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* Of [root, pool as written]: the pool with what all pools have, as JSON. */}}
{{- define "evenflow.pool" -}}
{{- mergeOverwrite (deepCopy (index . 0).Values.poolDefaults) (index . 1) | toJson -}}
{{- end }}

{{/* Of [root, name of a pool]: of its StatefulSet and its headless service. */}}
{{- define "evenflow.poolName" -}}
{{ include "evenflow.name" (index . 0) }}-executor-{{ index . 1 }}
{{- end }}

{{/* Seconds that a rank's pinned host memory takes to go, at 5 GB/s; `auto` may be half of a host's. */}}
{{- define "evenflow.unpinSeconds" -}}
{{- if or (ne .device "gpu") (not .layerwiseKv) -}}0
{{- else if kindIs "string" .kvHostMemoryBytes -}}240
{{- else -}}{{ divf (mulf .kvHostMemoryBytes .tensorParallelSize .pipelineParallelSize) 5e9 | ceil | int64 }}
{{- end -}}
{{- end }}

{{/* The least seconds between SIGTERM and SIGKILL. */}}
{{- define "evenflow.executorGrace" -}}
{{ add .drainSeconds (include "evenflow.unpinSeconds" .) 30 }}
{{- end }}

{{- define "evenflow.gatewayGrace" -}}
{{ add .lameDuckSeconds .drainSeconds 30 }}
{{- end }}

{{/* Of [root, name of a pool]. */}}
{{- define "evenflow.poolSelector" -}}
{{ include "evenflow.selector" (list (index . 0) "executor") }}
evenflow/pool: {{ index . 1 }}
{{- end }}

{{- define "evenflow.poolLabels" -}}
{{ include "evenflow.labels" (list (index . 0) "executor") }}
evenflow/pool: {{ index . 1 }}
{{- end }}

{{/* Not empty if a process has need of Redis. */}}
{{- define "evenflow.usesRedis" -}}
{{- if or .Values.tracker.enabled (and .Values.gateway.apiKeys.redis (not .Values.gateway.open)) }}yes{{ end -}}
{{- end }}

{{- define "evenflow.ownsRedis" -}}
{{- if and (include "evenflow.usesRedis" .) (not .Values.redis.urlSecret.name) }}yes{{ end -}}
{{- end }}
